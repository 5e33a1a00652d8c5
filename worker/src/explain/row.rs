//! A made-up row as the log would have it.

use aura_domain::{Cell, Image, Value, explain::MadeUp};
use aura_pgsource::{JsonForm, TableCatalog};
use serde_json::{Map, Value as Json};

use super::recent::Remembered;

/// New and old image of a made-up change, or what is wrong with it.
pub(super) fn images(made_up: &MadeUp, table: &TableCatalog) -> Result<(Option<Image>, Option<Image>), String> {
    let of = |record: &Option<Map<String, Json>>| record.as_ref().map(|record| image(record, table)).transpose();
    Ok((of(&made_up.record)?, of(&made_up.old_record)?))
}

fn image(record: &Map<String, Json>, table: &TableCatalog) -> Result<Image, String> {
    if let Some(unknown) = record.keys().find(|name| table.column(name).is_none()) {
        return Err(format!("The table has no column {unknown:?}."));
    }
    let cell = |column: &aura_pgsource::Column| {
        let json = matches!(column.ty.form, JsonForm::Json);
        let value = match record.get(&*column.name) {
            None | Some(Json::Null) => Value::Null,
            Some(value) => Value::Text(text(value, json).ok_or_else(|| not_scalar(&column.name))?.into()),
        };
        Ok(Cell { name: std::sync::Arc::clone(&column.name), type_oid: column.ty.oid, value })
    };
    table.columns.iter().map(cell).collect::<Result<_, _>>().map(Image)
}

/// Whether a remembered row has these values; the image that decides is looked at.
pub(super) fn has(known: &Remembered, values: &Map<String, Json>) -> bool {
    let image = known.change.as_ref().and_then(|change| change.new.as_ref().or(change.old.as_ref()));
    let equal = |(name, wanted): (&String, &Json)| match image.and_then(|image| image.get(name)) {
        Some(Value::Text(is)) => text(wanted, false).is_some_and(|wanted| *wanted == **is),
        Some(Value::Null) => wanted.is_null(),
        Some(Value::Unchanged) | None => false,
    };
    values.iter().all(equal)
}

fn not_scalar(column: &str) -> String {
    format!("Column {column:?}: give PostgreSQL's text form, as in \"{{1,2}}\" for an array.")
}

/// PostgreSQL's output of the value, as far as JSON says it; objects and arrays are values of JSON columns only.
fn text(value: &Json, json: bool) -> Option<String> {
    match value {
        Json::String(text) => Some(text.clone()),
        Json::Bool(yes) if !json => Some(if *yes { "t" } else { "f" }.to_owned()),
        Json::Number(number) => Some(number.to_string()),
        Json::Array(_) | Json::Object(_) | Json::Bool(_) => json.then(|| value.to_string()),
        Json::Null => None,
    }
}
