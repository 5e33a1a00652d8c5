//! Random policies, grants and row-security flags.

use aura_domain::quote_ident;

use super::{
    dice::Dice,
    table::{Column, Table},
};

/// Conditions of policies. `«word»` is a column of that class, or one of the claims' expressions below; a condition whose
/// class no column has isn't used.
const ATOMS: &[&str] = &[
    // The six shapes whose cost is measured.
    "«uuid» = «me»",
    "«uuid» = «me»",
    "«uuid» = (select «me»)",
    "«uuid» = auth.uid()",
    "«uuid» = (select auth.uid())",
    "exists (select 1 from shop.member m where m.room = «int» and m.user_id = «me»)",
    "«int» in (select m.room from shop.member m where m.user_id = (select «me»))",
    // The same turned around, and other claims.
    "«me» = «uuid»",
    "«uuid»::text = «sub»",
    "«text» = «sub»",
    "«text» = «claims» ->> 'org'",
    "«text» = (select «claims» ->> 'org')",
    "«text» = «claims» ->> 'org' or «uuid» = «me»",
    "«uuid» = «me» or «int» = («claims» ->> 'level')::int or «text» = («claims» ->> 'org')",
    "«claims» ->> 'org' like «text» || '%'",
    "«int» <= («claims» ->> 'level')::int",
    "«int» between 0 and coalesce((«claims» ->> 'level')::int, 1)",
    "«int»::text = «claims» ->> 'level'",
    "«claims» -> 'app_metadata' ->> 'team' = 'a'",
    "(«claims» #>> '{app_metadata,deep,n}')::int >= «int»",
    "(«claims» ->> 'role') = 'authenticated'",
    "(«claims» ->> 'role') = 'authenticated' and «uuid» = «me»",
    "«text» = any (array(select jsonb_array_elements_text(«claimsb» -> 'orgs')))",
    "«text» in (select jsonb_array_elements_text(«claimsb» -> 'orgs'))",
    "«claimsb» -> 'orgs' ? «text»",
    "(«claimsb» -> 'orgs') @> to_jsonb(«text»)",
    "«int» = any (array(select jsonb_array_elements_text(«claimsb» -> 'rooms')::int))",
    "«texts» && array(select jsonb_array_elements_text(«claimsb» -> 'orgs'))",
    "«me» = any («uuids»)",
    "«ints» @> array[(«claims» ->> 'level')::int]",
    "exists (select from unnest(«texts») x where x = «claims» ->> 'org')",
    "«jsonb» ->> 'owner' = «sub»",
    "«jsonb» @> jsonb_build_object('org', «claims» ->> 'org')",
    "«jsonb» -> 'tags' ? («claims» ->> 'org')",
    "(«jsonb» ->> 'n')::int = 1",
    "(«claimsb» - 'sub') ->> 'org' = «text»",
    "(«pair»).b is not null and («pair»).a = («claims» ->> 'level')::int",
    "not («claimsb» ? 'session_id')",
    "(select count(*) from jsonb_object_keys(«claimsb»)) > 2",
    "case when «sub» ~ '^[0-9a-fA-F-]{36}$' then «uuid» = («sub»)::uuid else false end",
    "case when «claims» ->> 'level' ~ '^[0-9]+$' then «int» = («claims» ->> 'level')::int else «bool» end",
    "case when «bool» then true else «uuid» = «me» end",
    "case «text» when 'org1' then true when «claims» ->> 'org' then null else false end",
    "«bool» or «uuid» = «me»",
    "«bool» and «uuid» = «me»",
    "«uuid» = «me» or null",
    "«uuid» is null or «uuid» = «me»",
    "«uuid» is not distinct from nullif(«sub», '')::uuid",
    // Helpers, and settings in other guises.
    "«uuid» = shop.me()",
    "«uuid» = shop.me_volatile()",
    "«uuid» = shop.me_definer()",
    "«uuid» = (select shop.me_definer())",
    "«uuid» = shop.me_immutable()",
    "«uuid» = (select shop.me_immutable())",
    "«text» = shop.sub_or_null()",
    "shop.in_room(«int»)",
    "shop.in_room_plpgsql(«int»)",
    "«int» in (select shop.my_rooms())",
    "shop.has_org(«text»)",
    "shop.same_org(«text», «claims» ->> 'org')",
    "auth.role() = 'authenticated'",
    "auth.jwt() ->> 'org' = «text»",
    "«uuid»::text = current_setting('request.jwt.claim.sub', true)",
    "«uuid» = nullif(current_setting('request.jwt.claim.sub'), '')::uuid",
    "«uuid» = (select nullif(current_setting('request.jwt.claim.sub', true), '')::uuid)",
    "current_setting('request.jwt.claim.role', true) = 'anon'",
    "«text» = current_setting('REQUEST.jwt.Claims')::json ->> 'org'",
    "«text» = current_setting('request.jwt' || '.claims')::json ->> 'org'",
    "«text» = (select current_setting(x)::json ->> 'org' from (values ('request.jwt.claims')) v (x))",
    "«text» = current_setting('request.jwt.claims', «bool»)::json ->> 'org'",
    "length(current_setting('request.jwt.claims')) % 2 = 0",
    "current_setting('request.jwt.claims') = current_setting('request.jwt.claims', true)",
    "current_setting('request.headers')::json ->> 'x-id' is null",
    "current_setting('request.method') = 'GET' and current_setting('request.path', true) = ''",
    "current_setting('request.cookies', true) = '{}'",
    "current_setting('app.none', true) is null",
    "current_setting('app.none') is null",
    "current_setting('role') like '%authenticated'",
    "current_user = '«authenticated»'",
    "current_user like '%editor' or «bool»",
    "pg_has_role('aura_authenticated', 'usage')",
    // The row alone.
    "true",
    "false",
    "null",
    "«bool»",
    "not «bool»",
    "«bool» is not false",
    "«int» > 1",
    "«int» % 2 = 0 and «int» is not null",
    "1 / «int» > 0",
    "«text»::int = 1",
    "case when «text» ~ '^[0-9]+$' then «text»::int = 1 else false end",
    "«text» < 'b'",
    "«text» collate \"C\" < 'b'",
    "«text» in ('org1', 'a', E'back\\\\slash', '$1', '_aura_n')",
    "«text» ilike 'ORG_' or «text» is null",
    "«text» <> 'current_setting(''request.jwt.claims''::text)'",
    "«text» || '.*' <> 'current_setting(''request.jwt.claims''::text)::json.*' and «uuid» = «me»",
    "«text» = «sub» or «text» = '«'",
    "length(«text») = octet_length(«text»)",
    "«num» = 1",
    "«num»::text = '1.0'",
    "«time» < now()",
    "«date» is null or «date» > '2021-01-01'",
    "extract(year from «date») > 0",
    "«enum» = 'low'",
    "«enum» > 'low'",
    "(«pair»).a = 1",
    "«pair» = row(1, 'x')::shop.pair",
    "«bytes» = '\\x00ff'",
    "cardinality(«texts») = 0 or «texts»[1] = 'org1'",
    "«ints»[0] = 1",
    "jsonb_typeof(«jsonb») = 'null'",
    "«jsonb» is null",
    "pg_column_size(«any») > 0",
    "«any» is not null",
    // The whole row.
    "shop.sees(«t»)",
    "shop.sees(«t».*)",
    "shop.sees_mine(«t»)",
    "«t» is not null",
    "«t».* is not null",
    "not («t» is null)",
    "«t»::text like '%org1%'",
    "to_jsonb(«t») ->> 'id' <> '3'",
    "to_jsonb(«t».*) ->> 'owner' = «sub»",
    "(select count(*) from jsonb_each(to_jsonb(«t»)) e where e.value = 'null') < 3",
    "exists (select 1 from shop.member «t» where «t».room = 1 and «t».user_id = «me»)",
    // Other tables.
    "(select count(*) from shop.member m where m.room = «int») > 1",
    "(select max(m.org) from shop.member m where m.room = «int») = «claims» ->> 'org'",
    "exists (with mine as (select m.room r from shop.member m where m.user_id = «me») select from mine where r = «int»)",
    "«int» = any (select m.room from shop.member m where m.org = «claims» ->> 'org')",
    "«int» not in (select m.room from shop.member m where m.user_id = «me»)",
    "exists (select from shop.member m, lateral (select «me» as x) l where m.user_id = l.x and m.room = «int»)",
    "exists (select from shop.member where member.org = «text»)",
    "exists (select from shop.closed)",
    "«bool» or exists (select from shop.closed c where c.id = «int»)",
];

/// The claims as `json`.
const CLAIMS: [&str; 8] = [
    "current_setting('request.jwt.claims')::json",
    "current_setting('request.jwt.claims')::json",
    "current_setting('request.jwt.claims', true)::json",
    "current_setting('request.jwt.claims'::text, true)::jsonb",
    "nullif(current_setting('request.jwt.claims', true), '')::json",
    "auth.jwt()",
    "(select auth.jwt())",
    "(select current_setting('request.jwt.claims')::jsonb)",
];

/// The user's id as `text`, and as `uuid`.
const SUBS: [&str; 3] = ["(«claims» ->> 'sub')", "(«claims» #>> '{sub}')", "(«claimsb» ->> 'sub')"];
const MES: [&str; 4] = ["(«claims» ->> 'sub')::uuid", "«sub»::uuid", "(select «sub»::uuid)", "cast(«sub» as uuid)"];

const ROLES: [&str; 7] = [
    "public",
    "\"«anon»\"",
    "\"«authenticated»\"",
    "\"«editor»\"",
    "\"«service_role»\"",
    "aura_authenticated",
    "aura_anon, \"«editor»\"",
];

/// Fills placeholders.
pub(super) struct Words<'a> {
    pub(super) table: &'a Table,
    /// Prefix of the project's roles.
    pub(super) roles: &'a str,
    /// One of [`ATOMS`], modulo their number, that is used if the table has the columns, so that many worlds use all.
    pub(super) atom: usize,
}

impl Words<'_> {
    /// Statements that make a table's policies, each by itself.
    pub(super) fn policies(&self, dice: &mut Dice) -> Vec<String> {
        let (table, mut all) = (self.table.quoted(), Vec::new());
        let alone = dice.chance(35);
        for n in 0..if alone { 1 } else { 1 + dice.below(4) } {
            // Names decide the order in which the server looks at them.
            let name = quote_ident(&format!("{}{n} policy", dice.pick(&["b", "A", "z", "\"", "ä"])));
            let kind = if !alone && dice.chance(25) { "restrictive" } else { "permissive" };
            let command = dice.pick(&["all", "all", "select", "select", "select", "insert", "update"]);
            // Most are for everybody, so that most identities have something to see.
            let to = if dice.chance(55) { "public" } else { dice.pick(&ROLES) };
            let to = self.fill(dice, to).unwrap_or_default();
            let checks = match command {
                "insert" => "with check (true)".to_owned(),
                "all" | "select" if dice.chance(4) => String::new(),
                _ if n == 0 && dice.chance(70) => {
                    let atom = self.fill(dice, ATOMS[self.atom % ATOMS.len()]);
                    format!("using ({})", atom.unwrap_or_else(|| self.condition(dice, 2)))
                }
                _ => format!("using ({})", self.condition(dice, 2)),
            };
            all.push(format!("create policy {name} on {table} as {kind} for {command} to {to} {checks}"));
        }
        all
    }

    /// Statements that decide whether row security is on and who may read what.
    pub(super) fn access(&self, dice: &mut Dice) -> Vec<String> {
        let table = self.table.quoted();
        let mut all = Vec::new();
        if dice.chance(92) {
            all.push(format!("alter table {table} enable row level security"));
        }
        if dice.chance(15) {
            all.push(format!("alter table {table} force row level security"));
        }
        for role in ["anon", "authenticated", "editor", "service_role"] {
            let role = quote_ident(&format!("{}{role}", self.roles));
            match dice.below(24) {
                0 => all.push(format!("revoke select on {table} from {role}")),
                1 | 2 => {
                    all.push(format!("revoke select on {table} from {role}"));
                    let columns: Vec<String> = self.table.columns.iter().map(Column::quoted).collect();
                    for column in dice.some(50, &columns) {
                        all.push(format!("grant select ({column}) on {table} to {role}"));
                    }
                }
                3 => all.push(format!("revoke usage on schema shop from {role}")),
                _ => {}
            }
        }
        let editor = quote_ident(&format!("{}editor", self.roles));
        match dice.below(30) {
            0 => all.push(format!("alter table {table} owner to {editor}")),
            1 => all.push(format!("alter role {editor} bypassrls")),
            _ => {}
        }
        all.push(match dice.below(6) {
            0 => "alter table shop.member enable row level security; \
                  create policy own on shop.member using (user_id = auth.uid())"
                .to_owned(),
            1 => "alter table shop.member enable row level security; \
                  create policy low on shop.member for select using (room < 2)"
                .to_owned(),
            2 => format!("revoke select on shop.member from {}", quote_ident(&format!("{}anon", self.roles))),
            _ => "alter table shop.member disable row level security".to_owned(),
        });
        all
    }

    /// What makes the functions of whole rows.
    pub(super) fn row_functions(&self) -> Vec<String> {
        let table = self.table.quoted();
        let of = |class: &str| self.table.columns.iter().find(|column| column.kind.class == class).map(Column::quoted);
        let (text, uuid) = (of("text").or_else(|| of("int")), of("uuid"));
        let sees = text.map_or_else(|| "(r).id > 2".to_owned(), |column| format!("(r).{column} is not null"));
        let mine = uuid.map_or_else(|| "(r).id < 5".to_owned(), |column| format!("(r).{column} = auth.uid()"));
        let function = |name: &str, body: &str| {
            format!(
                "create function shop.{name}(r {table}) returns bool language sql stable as $body$ select {body} $body$"
            )
        };
        vec![function("sees", &sees), function("sees_mine", &mine)]
    }

    fn condition(&self, dice: &mut Dice, depth: usize) -> String {
        if depth == 0 || dice.chance(50) {
            return loop {
                let atom = dice.pick(ATOMS);
                if let Some(atom) = self.fill(dice, atom) {
                    break atom;
                }
            };
        }
        let (a, b) = (self.condition(dice, depth - 1), self.condition(dice, depth - 1));
        match dice.below(10) {
            0..=3 => format!("({a}) or ({b})"),
            4 | 5 => format!("({a}) and ({b})"),
            6 => format!("not ({a})"),
            7 => format!("coalesce(({a}), ({b}))"),
            8 => format!("({a}) is not distinct from ({b})"),
            _ => format!("case when ({a}) then ({b}) else false end"),
        }
    }

    /// The text with every placeholder filled; `None` if there is no such column.
    fn fill(&self, dice: &mut Dice, text: &str) -> Option<String> {
        let mut filled = String::new();
        let mut rest = text;
        while let Some((head, tail)) = rest.split_once('«') {
            filled += head;
            let Some((word, tail)) = tail.split_once('»') else {
                // A lone one means itself.
                filled.push('«');
                rest = tail;
                continue;
            };
            filled += &self.word(dice, word)?;
            rest = tail;
        }
        Some(filled + rest)
    }

    fn fill_one(&self, dice: &mut Dice, texts: &[&'static str]) -> Option<String> {
        let text = dice.pick(texts);
        self.fill(dice, text)
    }

    fn word(&self, dice: &mut Dice, word: &str) -> Option<String> {
        let alias = quote_ident(&self.table.name);
        match word {
            "t" => Some(alias),
            "anon" | "authenticated" | "editor" | "service_role" => Some(format!("{}{word}", self.roles)),
            "claims" => Some(dice.pick(&CLAIMS).to_owned()),
            "claimsb" => Some(format!("({})::jsonb", dice.pick(&CLAIMS))),
            "sub" => self.fill_one(dice, &SUBS),
            "me" => self.fill_one(dice, &MES),
            _ => {
                let fits = |column: &&Column| word == "any" || column.kind.class == word;
                let fitting: Vec<String> = self.table.columns.iter().filter(fits).map(Column::quoted).collect();
                if fitting.is_empty() {
                    return None;
                }
                let column = &fitting[dice.below(fitting.len())];
                Some(match dice.below(3) {
                    0 => format!("{alias}.{column}"),
                    1 => format!("{}.{column}", self.table.quoted()),
                    _ => column.clone(),
                })
            }
        }
    }
}
