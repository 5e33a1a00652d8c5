use anyhow::{Context, Result};
use aura_domain::{Image, Value};
use aura_pgsource::{CheckOutcome, Identity, IdentityErrorKind, Verdict};

use super::{
    Tally,
    dice::Dice,
    oracle::{self, Oracle},
    table::Table,
    world::Stage,
};

/// One state of a table's policies and grants, some identities, and what the server says of them.
pub(super) struct Round<'a> {
    stage: &'a Stage,
    table: &'a Table,
    oid: u32,
    images: &'a [Image],
    identities: Vec<Known<'a>>,
    /// Of the identities that have a policy's say.
    asked: Vec<Identity>,
    roles: Vec<String>,
    row_security: bool,
    oracle: Oracle,
}

struct Known<'a> {
    identity: &'a Identity,
    rule: Rule,
    /// Column privileges, and whether the schema may be used.
    readable: Vec<bool>,
    usage: bool,
}

/// What decides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Rule {
    /// The role word isn't the project's.
    Unknown,
    /// It may read nothing, or, the service role, everything.
    Fixed(bool),
    /// The server; index of the identity there.
    Asked(usize),
}

impl<'a> Round<'a> {
    pub(super) async fn new(
        stage: &'a Stage,
        table: &'a Table,
        oid: u32,
        images: &'a [Image],
        identities: &'a [Identity],
    ) -> Result<Self> {
        let (sql, mut known) = (&stage.tenants.superuser, Vec::new());
        let (mut asked, mut roles) = (Vec::new(), Vec::new());
        for identity in identities {
            let role = format!("{}{}", stage.roles(), identity.role);
            if identity.role == "nobody" {
                known.push(Known { identity, rule: Rule::Unknown, readable: Vec::new(), usage: false });
                continue;
            }
            let privileges = "select has_schema_privilege($1::text, 'shop', 'usage'), array(
                    select has_column_privilege($1::text, $2::oid, attnum, 'select') from pg_attribute
                    where attrelid = $2 and attnum > 0 and not attisdropped order by attnum)";
            let row = sql.query_one(privileges, &[&role, &oid]).await?;
            let (usage, readable): (bool, Vec<bool>) = (row.get(0), row.get(1));
            let rule = match identity.role.as_str() {
                _ if !usage || !readable.contains(&true) => Rule::Fixed(false),
                "service_role" => Rule::Fixed(true),
                _ => {
                    asked.push(identity.clone());
                    roles.push(role);
                    Rule::Asked(asked.len() - 1)
                }
            };
            known.push(Known { identity, rule, readable, usage });
        }
        let inserts: Vec<String> = images.iter().map(|image| oracle::insert(table, image, image)).collect();
        let oracle = Oracle::ask(sql, table, &inserts, &roles, &asked).await?;
        let flag = "select relrowsecurity from pg_class where oid = $1";
        let row_security = sql.query_one(flag, &[&oid]).await?.get(0);
        Ok(Self { stage, table, oid, images, identities: known, asked, roles, row_security, oracle })
    }

    /// Batches of several kinds; what differs, in words.
    pub(super) async fn compare(&self, dice: &mut Dice, tally: &mut Tally) -> Result<Vec<String>> {
        let complete: Vec<usize> = (0..self.images.len()).filter(|at| self.is_complete(*at)).collect();
        let all: Vec<usize> = (0..self.identities.len()).collect();
        let mut wrong = self.batch("all", &complete, &all, tally).await?;
        // In another order, some repeated, for some of the identities.
        let mut many: Vec<usize> = dice.some(60, &complete);
        many.extend(dice.some(60, &complete));
        dice.shuffle(&mut many);
        let mut some = dice.some(60, &all);
        dice.shuffle(&mut some);
        wrong.extend(self.batch("some", &many, &some, tally).await?);
        wrong.extend(self.batch("one", &[dice.pick(&complete)], &all, tally).await?);
        wrong.extend(self.incomplete(dice, tally).await?);
        Ok(wrong)
    }

    /// Whether the image has every column that the table has now.
    fn is_complete(&self, at: usize) -> bool {
        let has = |name: &str| !matches!(self.images[at].get(name), None | Some(Value::Unchanged));
        self.table.columns.iter().all(|column| has(&column.name))
    }

    async fn check(&self, images: &[Image], who: &[usize]) -> Result<CheckOutcome> {
        let identities: Vec<Identity> = who.iter().map(|at| self.identities[*at].identity.clone()).collect();
        let checked = self.stage.tenants.check_oid(&self.table.name, self.oid, &[], images, &identities).await;
        checked.with_context(|| format!("the check of {images:?} for {identities:?}"))
    }

    async fn batch(&self, name: &str, images: &[usize], who: &[usize], tally: &mut Tally) -> Result<Vec<String>> {
        let rows: Vec<Image> = images.iter().map(|at| self.images[*at].clone()).collect();
        let outcome = self.check(&rows, who).await?;
        let mut wrong = Vec::new();
        if !outcome.oid_matches || outcome.row_security != self.row_security || outcome.unjudgeable != 0 {
            wrong.push(format!("{name}: {outcome:?}"));
        }
        for (at, verdict) in who.iter().zip(&outcome.verdicts) {
            let known = &self.identities[*at];
            let mut say = |what: String| wrong.push(format!("{name}, {:?}: {what}", known.identity));
            match (verdict, known.rule) {
                (Verdict::Error(IdentityErrorKind::UnknownRole), Rule::Unknown) => {}
                (Verdict::Error(kind), Rule::Asked(at)) if self.raises(images, at, kind) => tally.errors += 1,
                (Verdict::Decided { access, visible }, _) if visible.len() == images.len() => {
                    if (access.schema_usage, &access.readable) != (known.usage, &known.readable) {
                        say(format!("columns {access:?}, not {:?}", known.readable));
                    }
                    for (image, seen) in images.iter().zip(visible) {
                        *(if *seen { &mut tally.visible } else { &mut tally.hidden }) += 1;
                        if let Some(server) = self.differs(*image, known.rule, *seen) {
                            say(format!("visible {seen}, the server {server}: {}", self.show(*image)));
                        }
                    }
                }
                _ => say(format!("{verdict:?}")),
            }
        }
        Ok(wrong)
    }

    /// What the server says, if it isn't this.
    fn differs(&self, image: usize, rule: Rule, seen: bool) -> Option<String> {
        match rule {
            Rule::Asked(at) if self.oracle.agrees(image, at, seen) => None,
            Rule::Asked(at) => Some(format!("{:?}", self.oracle.fresh(image, at))),
            Rule::Fixed(all) if all == seen => None,
            rule => Some(format!("{rule:?}")),
        }
    }

    /// Whether the server raises this error, too, for one of the images.
    fn raises(&self, images: &[usize], at: usize, kind: &IdentityErrorKind) -> bool {
        let states = images.iter().flat_map(|image| self.oracle.states(*image, at));
        is_one_of(kind, states)
    }

    /// Images of which some columns are not known: what is visible must be so whatever those columns hold.
    async fn incomplete(&self, dice: &mut Dice, tally: &mut Tally) -> Result<Vec<String>> {
        let (mut images, mut fills) = (Vec::new(), Vec::new());
        let complete: Vec<usize> = (0..self.images.len()).filter(|at| self.is_complete(*at)).collect();
        for at in dice.some(40, &complete) {
            let mut image = self.images[at].clone();
            if dice.chance(30) {
                image.0.retain(|cell| &*cell.name == "id");
            }
            for cell in image.0.iter_mut().filter(|_| dice.chance(25)) {
                cell.value = Value::Unchanged;
            }
            // Whose base may be unknown, is unknown.
            let generated =
                |name: &str| self.table.columns.iter().any(|column| column.name == name && column.generated.is_some());
            image.0.retain(|cell| !generated(&cell.name));
            for other in [at, dice.pick(&complete)] {
                fills.push(oracle::insert(self.table, &image, &self.images[other]));
            }
            images.push(image);
        }
        if images.is_empty() {
            return Ok(Vec::new());
        }
        let oracle = Oracle::ask(&self.stage.tenants.superuser, self.table, &fills, &self.roles, &self.asked).await?;
        let all: Vec<usize> = (0..self.identities.len()).collect();
        let outcome = self.check(&images, &all).await?;
        let mut wrong = Vec::new();
        for (known, verdict) in self.identities.iter().zip(&outcome.verdicts) {
            let Rule::Asked(at) = known.rule else { continue };
            match verdict {
                Verdict::Decided { visible, .. } => {
                    for (n, image) in images.iter().enumerate().filter(|(n, _)| visible[*n]) {
                        tally.partial += 1;
                        let differs = |fill| !oracle.agrees(fill, at, true);
                        if differs(2 * n) || differs(2 * n + 1) {
                            wrong.push(format!("visible to {:?} though not known: {image:?}", known.identity));
                        }
                    }
                }
                Verdict::Error(kind) => {
                    let states = (0..fills.len()).flat_map(|fill| oracle.states(fill, at));
                    if !is_one_of(kind, states) {
                        wrong.push(format!("incomplete images, {:?}: {kind:?}: {images:?}", known.identity));
                    }
                }
            }
        }
        Ok(wrong)
    }

    fn show(&self, image: usize) -> String {
        oracle::insert(self.table, &self.images[image], &self.images[image])
    }
}

fn is_one_of<'a>(kind: &IdentityErrorKind, mut states: impl Iterator<Item = &'a str>) -> bool {
    match kind {
        IdentityErrorKind::Policy(code) => states.any(|state| state == code.code()),
        IdentityErrorKind::NotJudgeable => states.any(|state| ["42703", "25006"].contains(&state)),
        _ => false,
    }
}
