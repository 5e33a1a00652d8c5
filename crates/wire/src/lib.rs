//! Versioned encodings: bus subjects and envelopes, the control protocol between fronts and workers, and the Phoenix
//! frames that clients speak.

mod broadcast;
pub mod control;
mod envelope;
pub mod phoenix;
mod subject;

pub use broadcast::{ChannelMessage, ChannelMessageError, is_object};
pub use envelope::{ChangeEnvelope, EnvelopeError, GapEnvelope, GapReason, IncomingChange};
pub use subject::{Subject, SubjectError, decode_token, encode_token};
