//! What a value's type means for its JSON form.

use std::sync::Arc;

use tokio_postgres::types::{Kind, Type};

/// A data type as far as JSON needs it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TypeInfo {
    /// `pg_type.oid`.
    pub oid: u32,
    /// `pg_type.typname`: `int8`, `_text`, `mood`; a domain's own name.
    pub name: Arc<str>,
    /// `pg_type.oid` below all domains: what comparisons go by.
    pub base_oid: u32,
    /// How `to_jsonb` shows it.
    pub form: JsonForm,
}

/// How `to_jsonb` shows values of a type (`jsonb_categorize_type` in PostgreSQL's `jsonb.c`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum JsonForm {
    /// true, false.
    Bool,
    /// A number with all its digits; NaN and ±Infinity are strings.
    Number,
    /// `2026-01-02T03:04:05`.
    Timestamp,
    /// The same with `+00:00`.
    TimestampTz,
    /// Nested as it is.
    Json,
    /// Hexadecimal digits without `\x`, as the original does (supabase-wire.md §3.2).
    Bytea,
    /// A JSON array, nested for several dimensions.
    Array {
        /// Type of the elements.
        element: Arc<TypeInfo>,
        /// `pg_type.typdelim`: a comma, but a semicolon for `box`.
        delimiter: char,
    },
    /// `int2vector` and `oidvector`, whose text form has blanks only.
    Vector {
        /// Type of the elements.
        element: Arc<TypeInfo>,
    },
    /// A composite type: an object of its attributes, in order.
    Composite {
        /// Name and type of each.
        attributes: Vec<(Arc<str>, Arc<TypeInfo>)>,
    },
    /// `hstore`: an object of strings and nulls.
    Hstore,
    /// Everything else: its text form as a string.
    Text,
}

impl TypeInfo {
    /// A built-in type, known without asking the database. `None` for types made by users and extensions.
    pub fn built_in(oid: u32) -> Option<Arc<Self>> {
        let known = Type::from_oid(oid)?;
        Some(Arc::new(Self { oid, name: known.name().into(), base_oid: oid, form: built_in_form(&known)? }))
    }

    /// A type of which only the name is known: values are shown as text.
    pub(crate) fn text(oid: u32, name: &str) -> Arc<Self> {
        Arc::new(Self { oid, name: name.into(), base_oid: oid, form: JsonForm::Text })
    }
}

fn built_in_form(known: &Type) -> Option<JsonForm> {
    Some(match *known {
        Type::BOOL => JsonForm::Bool,
        Type::INT2 | Type::INT4 | Type::INT8 | Type::FLOAT4 | Type::FLOAT8 | Type::NUMERIC => JsonForm::Number,
        Type::TIMESTAMP => JsonForm::Timestamp,
        Type::TIMESTAMPTZ => JsonForm::TimestampTz,
        Type::JSON | Type::JSONB => JsonForm::Json,
        Type::BYTEA => JsonForm::Bytea,
        Type::INT2_VECTOR => JsonForm::Vector { element: TypeInfo::built_in(Type::INT2.oid())? },
        Type::OID_VECTOR => JsonForm::Vector { element: TypeInfo::built_in(Type::OID.oid())? },
        Type::BOX_ARRAY => array_of(TypeInfo::built_in(Type::BOX.oid())?, ';'),
        _ => match known.kind() {
            Kind::Array(element) => array_of(TypeInfo::built_in(element.oid())?, ','),
            _ => JsonForm::Text,
        },
    })
}

/// Elements of `bytea[]` keep their `\x`: only the column type itself loses it in the original.
pub(crate) fn array_of(element: Arc<TypeInfo>, delimiter: char) -> JsonForm {
    let element = match element.form {
        JsonForm::Bytea => TypeInfo::text(element.oid, &element.name),
        _ => element,
    };
    JsonForm::Array { element, delimiter }
}
