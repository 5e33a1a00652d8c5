use aura_domain::Generation;
use bytes::{BufMut, BytesMut};
use proptest::prelude::*;

use super::*;
use crate::{Decoder, Frame, Plugin};

const TABLE: u32 = 16_400;

fn begin() -> Bytes {
    let mut message = BytesMut::new();
    message.put_u8(b'B');
    message.put_u64(0x100);
    message.put_i64(-POSTGRES_EPOCH_US + 7);
    message.put_u32(9);
    message.freeze()
}

fn describe() -> Bytes {
    let mut message = BytesMut::new();
    message.put_u8(b'R');
    message.put_u32(TABLE);
    message.put_slice(b"public\0t\0d");
    message.put_u16(2);
    for (flags, name, oid) in [(1, &b"id\0"[..], 23), (0, &b"note\0"[..], 25)] {
        message.put_u8(flags);
        message.put_slice(name);
        message.put_u32(oid);
        message.put_i32(-1);
    }
    message.freeze()
}

/// `tuples`: its tag, then for each column `n`, `u` or a text.
fn row(tag: u8, tuples: &[(u8, [&str; 2])]) -> Bytes {
    let mut message = BytesMut::new();
    message.put_u8(tag);
    message.put_u32(TABLE);
    for (kind, values) in tuples {
        message.put_u8(*kind);
        message.put_u16(2);
        for value in values {
            match *value {
                "n" | "u" => message.put_slice(value.as_bytes()),
                text => {
                    message.put_u8(b't');
                    message.put_u32(u32::try_from(text.len()).unwrap());
                    message.put_slice(text.as_bytes());
                }
            }
        }
    }
    message.freeze()
}

fn decoder() -> Decoder {
    let mut decoder = Decoder::new(Plugin::PgOutput, Generation(1));
    let expected = LogEvent::Begin { xid: 9, commit: Lsn(0x100), end: Lsn::ZERO, commit_time_us: 7 };
    assert_eq!(decoder.decode(Lsn(1), &begin()), expected);
    assert_eq!(decoder.decode(Lsn(0), &describe()), LogEvent::Other);
    decoder
}

fn images(message: &Bytes) -> (Vec<Value>, Vec<Value>) {
    let LogEvent::Change(change) = decoder().decode(Lsn(5), message) else { panic!("not a change") };
    let values = |image: Option<Image>| image.unwrap_or_default().0.into_iter().map(|cell| cell.value).collect();
    (values(change.new), values(change.old))
}

fn text(value: &str) -> Value {
    Value::Text(value.into())
}

#[test]
fn r_sd_6_rows_behind_a_begin_that_is_passed_over_are_of_no_transaction() {
    let mut decoder = decoder();
    let insert = row(b'I', &[(b'N', ["1", "a"])]);
    assert_eq!(decoder.pass_over(&insert), Frame::Inside);
    assert!(matches!(decoder.decode(Lsn(5), &insert), LogEvent::Change(_)), "a row alone");
    assert_eq!(decoder.pass_over(b"C"), Frame::Commit);
    assert_eq!(decoder.pass_over(&begin()), Frame::Begin);
    let orphan = decoder.decode(Lsn(10), &insert);
    assert!(matches!(orphan, LogEvent::Skipped { reason: SkipReason::NoTransaction, relation: Some(_) }));
}

#[test]
fn an_update_without_old_tuple_has_the_key_of_the_new_one() {
    let (new, old) = images(&row(b'U', &[(b'N', ["1", "x"])]));
    assert_eq!((new, old), (vec![text("1"), text("x")], vec![text("1")]));
}

#[test]
fn of_a_key_tuple_only_the_key_counts() {
    let (new, old) = images(&row(b'U', &[(b'K', ["1", "n"]), (b'N', ["2", "n"])]));
    assert_eq!((new, old), (vec![text("2"), Value::Null], vec![text("1")]));
    let (new, old) = images(&row(b'D', &[(b'K', ["1", "n"])]));
    assert_eq!((new, old), (vec![], vec![text("1")]));
}

#[test]
fn r_dec_3_unchanged_toast_is_filled_in_or_marked() {
    let (new, _) = images(&row(b'U', &[(b'O', ["1", "big"]), (b'N', ["1", "u"])]));
    assert_eq!(new, [text("1"), text("big")]);
    let (new, _) = images(&row(b'U', &[(b'N', ["1", "u"])]));
    assert_eq!(new, [text("1"), Value::Unchanged]);
}

#[test]
fn r_dec_4_a_row_nobody_described_is_skipped() {
    let mut decoder = Decoder::new(Plugin::PgOutput, Generation(1));
    decoder.decode(Lsn(1), &begin());
    let insert = row(b'I', &[(b'N', ["1", "x"])]);
    let skipped = |reason| LogEvent::Skipped { reason, relation: None };
    assert_eq!(decoder.decode(Lsn(5), &insert), skipped(SkipReason::UnknownRelation));
    assert_eq!(decoder.decode(Lsn(5), &Bytes::from_static(b"?")), skipped(SkipReason::Malformed));
    assert_eq!(decoder.decode(Lsn(5), &Bytes::new()), skipped(SkipReason::Malformed));
}

#[test]
fn r_dec_4_a_row_that_is_cut_off_names_its_table() {
    let insert = row(b'I', &[(b'N', ["1", "a longer text"])]);
    let event = decoder().decode(Lsn(5), &insert.slice(..insert.len() - 4));
    let LogEvent::Skipped { reason, relation } = event else { panic!("not skipped") };
    assert_eq!(
        (reason, relation.map(|relation| relation.quoted()).as_deref()),
        (SkipReason::Malformed, Some("\"public\".\"t\""))
    );
    let event = decoder().oversize(&insert[..9]);
    assert!(matches!(event, LogEvent::Skipped { reason: SkipReason::TooLong, relation: Some(_) }));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    #[test]
    fn r_dec_4_no_bytes_make_it_panic(bytes in proptest::collection::vec(any::<u8>(), 0..100)) {
        decoder().decode(Lsn(1), &Bytes::from(bytes));
    }

    #[test]
    fn r_dec_4_no_broken_message_makes_it_panic(at in 0usize..60, byte in any::<u8>(), cut in 0usize..60, which in 0..4) {
        let message = match which {
            0 => row(b'U', &[(b'O', ["1", "big"]), (b'N', ["1", "u"])]),
            1 => describe(),
            2 => begin(),
            _ => Bytes::from_static(b"T\0\0\0\x02\0\0\0\x40\x10\0\0\x40\x10"),
        };
        let mut bytes = message.to_vec();
        if let Some(target) = bytes.get_mut(at) {
            *target = byte;
        }
        bytes.truncate(cut);
        let mut decoder = decoder();
        decoder.decode(Lsn(1), &Bytes::from(bytes));
        decoder.decode(Lsn(2), &row(b'I', &[(b'N', ["1", "x"])]));
    }
}
