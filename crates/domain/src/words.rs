/// A text that is no word of a closed set.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("not a word of {0}")]
pub struct ParseWordError(
    /// Name of the set's type.
    pub &'static str,
);

/// Without the feature `openapi` there is nothing to add.
#[cfg(not(feature = "openapi"))]
#[doc(hidden)]
#[macro_export]
macro_rules! describe_words {
    ($name:ident, $description:expr) => {};
}

/// A closed set of words with the same spelling in Rust, SQL and JSON. The caller's crate needs `serde`.
#[macro_export]
macro_rules! words {
    ($(#[doc = $doc:literal])* $name:ident { $($(#[$variant_doc:meta])* $variant:ident = $word:literal),+ $(,)? }) => {
        $(#[doc = $doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
        pub enum $name {
            $($(#[$variant_doc])* #[serde(rename = $word)] $variant,)+
        }

        $crate::describe_words!($name, concat!($($doc),*));

        impl $name {
            /// Every word.
            pub const ALL: &'static [Self] = &[$(Self::$variant),+];

            /// The stored and shown word.
            pub fn as_str(self) -> &'static str {
                match self { $(Self::$variant => $word,)+ }
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.as_str())
            }
        }

        impl std::str::FromStr for $name {
            type Err = $crate::ParseWordError;
            fn from_str(word: &str) -> ::std::result::Result<Self, Self::Err> {
                match word {
                    $($word => Ok(Self::$variant),)+
                    _ => Err($crate::ParseWordError(stringify!($name))),
                }
            }
        }
    };
}
