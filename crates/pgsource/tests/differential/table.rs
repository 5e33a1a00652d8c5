//! Random tables and what happens to their rows.

use aura_domain::quote_ident;

use super::{claims::CAROL, dice::Dice};
use crate::tenant::{ALICE, BOB};

const TABLES: [&str; 12] = [
    "t",
    "notes",
    "select",
    "My \"Table\"",
    "a.b",
    "ünïcode täb",
    "_aura_o",
    "current_setting",
    "o'x",
    "json",
    "_aura_i",
    "back\\slash, (x)",
];

const COLUMNS: [&str; 34] = [
    "owner",
    "org",
    "room",
    "select",
    "from",
    "a.b",
    "we\"ird",
    "with space",
    "Upper",
    "ünïcode",
    "o'brien",
    "current_setting('request.jwt.claims'::text)",
    "_aura_n",
    "_aura_i",
    "_aura_o",
    "_aura_claims",
    "$1",
    "x,y",
    "(",
    "claims",
    "role",
    "user",
    "n",
    "i",
    "r",
    "value",
    "ordinality",
    "unnest",
    "current_user",
    "true",
    "null",
    "back\\slash",
    "{}",
    "req.*",
];

/// What a column holds, and which placeholder of the policies it can stand for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Kind {
    /// Placeholder word.
    pub(super) class: &'static str,
    sql: &'static str,
    values: &'static [&'static str],
}

const TEXTS: &[&str] = &[
    "'a'",
    "'A'",
    "'b'",
    "''",
    "'org1'",
    "'org2'",
    "'ORG1'",
    "'o''brien'",
    "'ä'",
    "'z'",
    "'1'",
    "'x y'",
    "'a,b'",
    "'{}'",
    "'(\"'",
    "'back\\slash'",
    "'NULL'",
    "'a11ce000-0000-4000-8000-000000000001'",
    "'$1'",
    "E'line\\nbreak'",
];
const UUIDS: &[&str] = &[
    "'a11ce000-0000-4000-8000-000000000001'",
    "'b0b00000-0000-4000-8000-000000000002'",
    "'ca401000-0000-4000-8000-000000000003'",
];
const INTS: &[&str] = &["0", "1", "2", "3", "-1"];

const KINDS: [Kind; 31] = [
    Kind { class: "uuid", sql: "uuid", values: UUIDS },
    Kind { class: "uuid", sql: "uuid", values: UUIDS },
    Kind { class: "uuid", sql: "shop.ref", values: UUIDS },
    Kind { class: "text", sql: "text", values: TEXTS },
    Kind { class: "text", sql: "text", values: TEXTS },
    Kind { class: "text", sql: "text collate \"C\"", values: TEXTS },
    Kind { class: "text", sql: "text collate shop.ci", values: TEXTS },
    Kind { class: "text", sql: "varchar(60)", values: TEXTS },
    Kind { class: "text", sql: "char(5)", values: &["'a'", "'org1'", "'org2'", "'b  '", "''", "'ä'"] },
    Kind { class: "text", sql: "shop.word", values: &["'a'", "'b'", "'org1'", "'org2'", "''"] },
    Kind { class: "text", sql: "shop.must not null", values: &["'a'", "'org1'", "'b'"] },
    Kind { class: "int", sql: "int", values: INTS },
    Kind { class: "int", sql: "int", values: INTS },
    Kind { class: "int", sql: "bigint", values: &["0", "1", "2", "3", "9007199254740993"] },
    Kind { class: "int", sql: "smallint", values: INTS },
    Kind { class: "int", sql: "shop.positive", values: &["1", "2", "3"] },
    Kind { class: "bool", sql: "bool", values: &["true", "false"] },
    Kind { class: "bool", sql: "bool", values: &["true", "false"] },
    Kind { class: "num", sql: "numeric", values: &["1", "1.0", "1.00", "2.5", "-1", "0"] },
    Kind { class: "num", sql: "float8", values: &["1", "0", "'-0'", "2.5", "0.1", "1e300"] },
    Kind { class: "num", sql: "numeric(6,2)", values: &["1", "2.5", "-1"] },
    Kind {
        class: "time",
        sql: "timestamptz",
        values: &["'2020-01-01 00:00:00+00'", "'2999-01-01 12:00:00.000001+02'", "'infinity'", "'-infinity'"],
    },
    Kind { class: "date", sql: "date", values: &["'2020-01-01'", "'2999-12-31'", "'0044-03-15 BC'"] },
    Kind {
        class: "jsonb",
        sql: "jsonb",
        values: &[
            r#"'{"owner": "a11ce000-0000-4000-8000-000000000001", "org": "org1", "n": 1}'"#,
            r#"'{"owner": "not", "org": "org2", "n": "x", "tags": ["org1", "ä"]}'"#,
            "'null'",
            "'[1, \"org1\", null]'",
            r#"'"str \\ \" ü"'"#,
            "'{}'",
        ],
    },
    Kind { class: "jsonb", sql: "jsonb", values: &[r#"'{"org": "org1"}'"#, r#"'{"org": "org2", "n": 2}'"#] },
    Kind {
        class: "texts",
        sql: "text[]",
        values: &[
            "'{}'",
            "'{org1}'",
            "'{org2,NULL}'",
            r#"'{"a,b","o''brien","\"q\\"}'"#,
            "'{\"NULL\"}'",
            "'{{a,b},{ä,d}}'",
        ],
    },
    Kind { class: "ints", sql: "int[]", values: &["'{}'", "'{1,2}'", "'{3,NULL}'", "'[0:1]={1,3}'"] },
    Kind {
        class: "uuids",
        sql: "uuid[]",
        values: &["'{}'", "'{a11ce000-0000-4000-8000-000000000001,b0b00000-0000-4000-8000-000000000002}'", "'{NULL}'"],
    },
    Kind { class: "enum", sql: "shop.mood", values: &["'low'", "'mid'", "'HIGH, \"x\"'", "'select'"] },
    Kind { class: "pair", sql: "shop.pair", values: &["'(1,x)'", "'(,\"a,(\"\"b\")'", "'(2,)'", "'(,)'"] },
    Kind { class: "bytes", sql: "bytea", values: &["'\\x00ff'", "''", "'\\x5c22'"] },
];

#[derive(Debug, Clone)]
pub(super) struct Column {
    pub(super) name: String,
    pub(super) kind: Kind,
    /// Its values come from this expression.
    pub(super) generated: Option<String>,
}

impl Column {
    pub(super) fn quoted(&self) -> String {
        quote_ident(&self.name)
    }
}

#[derive(Debug)]
pub(super) struct Table {
    pub(super) name: String,
    pub(super) columns: Vec<Column>,
    /// What makes it.
    pub(super) ddl: Vec<String>,
}

impl Table {
    pub(super) fn random(dice: &mut Dice) -> Self {
        let name = dice.pick(&TABLES).to_owned();
        let mut names: Vec<&str> = COLUMNS.to_vec();
        dice.shuffle(&mut names);
        if dice.chance(15) {
            names.retain(|other| *other != name);
            names.insert(0, &name);
        }
        let mut columns: Vec<Column> = Vec::new();
        for name in names.into_iter().take(4 + dice.below(6)) {
            columns.push(Column { name: name.to_owned(), kind: dice.pick(&KINDS), generated: None });
        }
        // What most policies ask for is there most of the time.
        for (at, kind) in [(0, KINDS[0]), (1, KINDS[3]), (2, KINDS[11])] {
            if dice.chance(80) {
                columns[at].kind = kind;
            }
        }
        let mut table = Self { name, columns, ddl: Vec::new() };
        table.make(dice);
        table
    }

    /// With its schema, quoted.
    pub(super) fn quoted(&self) -> String {
        format!("shop.{}", quote_ident(&self.name))
    }

    fn make(&mut self, dice: &mut Dice) {
        let table = self.quoted();
        let mut parts: Vec<String> = self.columns.iter().map(|it| format!("{} {}", it.quoted(), it.kind.sql)).collect();
        let from = self.columns.iter().find(|it| it.kind.sql == "text" || it.kind.sql == "int").map(Column::quoted);
        if let Some(from) = from.filter(|_| dice.chance(30)) {
            let expression = format!("'org' || {from}");
            parts.push(format!("made text generated always as ({expression}) stored"));
            self.columns.push(Column { name: "made".to_owned(), kind: KINDS[3], generated: Some(expression) });
        }
        let mut places: Vec<usize> = (0..parts.len()).collect();
        dice.shuffle(&mut places);
        let mut parts: Vec<String> = places.iter().map(|at| parts[*at].clone()).collect();
        let dropped = [("gone", "int not null"), ("gone too", "shop.mood"), ("g.o.n.e", "text default 'x'")];
        let dropped = dice.some(30, &dropped);
        for (name, kind) in &dropped {
            parts.insert(dice.below(parts.len() + 1), format!("{} {kind}", quote_ident(name)));
        }
        parts.insert(dice.below(parts.len() + 1), "id bigint primary key".to_owned());
        self.ddl.push(format!("create table {table} ({})", parts.join(", ")));
        for (name, _) in dropped {
            self.ddl.push(format!("alter table {table} drop column {}", quote_ident(name)));
        }
        self.ddl.push(format!("alter table {table} replica identity full"));
    }

    /// Statements that each change one row, and one that adds a column amid them.
    pub(super) fn history(&mut self, dice: &mut Dice) -> Vec<String> {
        let (table, mut statements, mut live) = (self.quoted(), Vec::new(), Vec::new());
        let late = dice.chance(20);
        for id in 0..5 + dice.below(8) {
            live.push(id);
            statements.push(self.insert(dice, id));
            if late && id == 3 {
                statements.push(format!("alter table {table} add late int default 2"));
                self.columns.push(Column { name: "late".to_owned(), kind: KINDS[11], generated: None });
            }
            if dice.chance(60) {
                let id = dice.pick(&live);
                let set = self.assignments(dice);
                statements.push(format!("update {table} set {set} where {table}.id = {id}"));
            }
            if dice.chance(20) {
                let id = live.swap_remove(dice.below(live.len()));
                statements.push(format!("delete from {table} where {table}.id = {id}"));
            }
        }
        statements
    }

    fn insert(&self, dice: &mut Dice, id: usize) -> String {
        let mut names = vec!["id".to_owned()];
        let mut values = vec![id.to_string()];
        for column in self.columns.iter().filter(|column| column.generated.is_none()) {
            names.push(column.quoted());
            values.push(column.value(dice));
        }
        format!("insert into {} ({}) values ({})", self.quoted(), names.join(", "), values.join(", "))
    }

    fn assignments(&self, dice: &mut Dice) -> String {
        let plain: Vec<&Column> = self.columns.iter().filter(|column| column.generated.is_none()).collect();
        let mut chosen = dice.some(40, &plain);
        if chosen.is_empty() {
            chosen.push(plain[0]);
        }
        let set = |column: &&Column| format!("{} = {}", column.quoted(), column.value(dice));
        chosen.iter().map(set).collect::<Vec<_>>().join(", ")
    }
}

impl Column {
    pub(super) fn is_never_null(&self) -> bool {
        self.kind.sql.ends_with("not null")
    }

    fn value(&self, dice: &mut Dice) -> String {
        if !self.is_never_null() && dice.chance(15) {
            "null".to_owned()
        } else {
            dice.pick(self.kind.values).to_owned()
        }
    }
}

/// The members of rooms: the table that policies look into.
pub(super) fn members(dice: &mut Dice) -> String {
    let mut rows = Vec::new();
    for room in 0..4 {
        for user in dice.some(40, &[ALICE, BOB, CAROL]) {
            rows.push(format!("({room}, '{user}', '{}')", dice.pick(&["org1", "org2", "ä"])));
        }
    }
    rows.push("(null, null, null)".to_owned());
    format!("delete from shop.member; insert into shop.member values {}", rows.join(", "))
}
