//! Schemas of the scalar types, for the API's document: each is its wire form.

use std::borrow::Cow;

use utoipa::{
    PartialSchema, ToSchema,
    openapi::{
        KnownFormat, ObjectBuilder, RefOr, SchemaFormat,
        schema::{Schema, Type},
    },
};

use crate::{Epoch, Generation, Lsn, Position, ProjectId, SourceId, WorkerId};

macro_rules! scalar {
    ($name:ident, $kind:ident, $format:expr, $description:literal, $example:expr) => {
        impl PartialSchema for $name {
            fn schema() -> RefOr<Schema> {
                let object = ObjectBuilder::new().schema_type(Type::$kind).format($format);
                object.description(Some($description)).examples([$example]).into()
            }
        }

        impl ToSchema for $name {
            fn name() -> Cow<'static, str> {
                stringify!($name).into()
            }
        }
    };
}

const UUID: Option<SchemaFormat> = Some(SchemaFormat::KnownFormat(KnownFormat::Uuid));
const INT64: Option<SchemaFormat> = Some(SchemaFormat::KnownFormat(KnownFormat::Int64));
const INT32: Option<SchemaFormat> = Some(SchemaFormat::KnownFormat(KnownFormat::Int32));

scalar!(SourceId, String, UUID, "Id of a source.", "0191d0a0-0000-7000-8000-000000000001");
scalar!(ProjectId, String, UUID, "Id of a project.", "6f9619ff-8b86-4d01-b42d-00cf4fc964ff");
scalar!(WorkerId, String, None, "A worker, unique per start.", "worker-0-4f9a2c");
scalar!(Lsn, String, None, "A position in the write-ahead log.", "16/B374D848");
scalar!(Epoch, Integer, INT64, "Fencing token of an engine: rises with each worker that takes over.", 7);
scalar!(Generation, Integer, INT32, "Rises when positions of a source lose their meaning.", 1);
scalar!(Position, String, None, "Identifies a change.", "1-00000000016b3748-00000000016b3700-0");

/// The schema of a [`words!`](crate::words) type.
#[doc(hidden)]
pub fn word_schema(words: &[&str], description: &str) -> RefOr<Schema> {
    let object = ObjectBuilder::new().schema_type(Type::String).enum_values(Some(words.iter().copied()));
    object.description(Some(description.trim())).into()
}

/// What [`words!`](crate::words) adds to a type.
#[doc(hidden)]
#[macro_export]
macro_rules! describe_words {
    ($name:ident, $description:expr) => {
        impl $crate::utoipa::PartialSchema for $name {
            fn schema() -> $crate::utoipa::openapi::RefOr<$crate::utoipa::openapi::schema::Schema> {
                let words: Vec<&str> = Self::ALL.iter().map(|word| word.as_str()).collect();
                $crate::word_schema(&words, $description)
            }
        }

        impl $crate::utoipa::ToSchema for $name {
            fn name() -> std::borrow::Cow<'static, str> {
                stringify!($name).into()
            }
        }
    };
}
