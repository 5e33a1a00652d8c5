use aura_domain::Generation;
use proptest::prelude::*;

use super::*;
use crate::{Decoder, Frame, Plugin};

const BEGIN: &str =
    r#"{"action":"B","xid":747,"timestamp":"2026-11-29 22:43:31.744691+00","lsn":"0/1564F80","nextlsn":"0/1564FB0"}"#;
const COMMIT: &str =
    r#"{"action":"C","xid":747,"timestamp":"2026-11-29 22:43:31.744691+00","lsn":"0/1564F80","nextlsn":"0/1564FB0"}"#;

fn decoder() -> Decoder {
    let mut decoder = Decoder::new(Plugin::Wal2json, Generation(3));
    assert!(matches!(decode(&mut decoder, 1, BEGIN), LogEvent::Begin { xid: 747, .. }));
    decoder
}

fn decode(decoder: &mut Decoder, start: u64, line: &str) -> LogEvent {
    decoder.decode(Lsn(start), &Bytes::copy_from_slice(line.as_bytes()))
}

fn change(event: LogEvent) -> aura_domain::Change {
    match event {
        LogEvent::Change(change) => change,
        other => panic!("not a change: {other:?}"),
    }
}

fn row(column: &str) -> String {
    format!(r#"{{"action":"I","xid":747,"schema":"s","table":"t","columns":[{column}]}}"#)
}

fn value_of(column: &str) -> Option<Value> {
    change(decode(&mut decoder(), 5, &row(column)))
        .new
        .and_then(|image| image.0.into_iter().next())
        .map(|cell| cell.value)
}

#[test]
fn a_transaction_says_when_it_was_committed_and_what_to_confirm() {
    let mut decoder = Decoder::new(Plugin::Wal2json, Generation(3));
    let commit_time_us = 1_795_992_211_744_691;
    let expected = LogEvent::Begin { xid: 747, commit: Lsn(0x156_4f80), end: Lsn(0x156_4fb0), commit_time_us };
    assert_eq!(decode(&mut decoder, 1, BEGIN), expected);
    let expected = LogEvent::Commit { commit: Lsn(0x156_4f80), end: Lsn(0x156_4fb0) };
    assert_eq!(decode(&mut decoder, 9, COMMIT), expected);
}

#[test]
fn times_are_read_to_the_microsecond() {
    assert_eq!(timestamp_us("1970-01-01 00:00:00+00"), Some(0));
    assert_eq!(timestamp_us("2000-03-01 00:00:00.5+00"), Some(951_868_800_500_000));
    assert_eq!(timestamp_us("2026-11-29 22:43:31.74597+00"), timestamp_us("2026-11-29 22:43:31.745970+00"));
    for bad in
        ["", "2026-11-29 22:43:31.7", "2026-13-01 00:00:00+00", "x-1-1 0:0:0+00", "9999999999999-01-01 00:00:00+00"]
    {
        assert_eq!(timestamp_us(bad), None, "{bad}");
    }
}

#[test]
fn r_dec_1_values_are_postgres_text() {
    for (column, text) in [
        (r#"{"name":"a","typeoid":20,"value":9223372036854775807}"#, "9223372036854775807"),
        (r#"{"name":"a","typeoid":1700,"value":1.10}"#, "1.10"),
        (
            r#"{"name":"a","typeoid":1700,"value":123456789012345678901234567890.123456789}"#,
            "123456789012345678901234567890.123456789",
        ),
        (r#"{"name":"a","typeoid":701,"value":-0}"#, "-0"),
        (r#"{"name":"a","typeoid":701,"value":1e+300}"#, "1e+300"),
        (r#"{"name":"a","typeoid":16,"value":true}"#, "t"),
        (r#"{"name":"a","typeoid":16,"value":false}"#, "f"),
        (r#"{"name":"a","typeoid":17,"value":"deadbeef"}"#, "\\xdeadbeef"),
        (r#"{"name":"a","typeoid":17,"value":""}"#, "\\x"),
        (r#"{"name":"a","typeoid":16423,"value":"\\xdead"}"#, "\\xdead"),
        (r#"{"name":"a","typeoid":25,"value":"q\"\\\u0001é\u2028"}"#, "q\"\\\u{1}é\u{2028}"),
        (r#"{"name":"a","typeoid":25,"value":"null"}"#, "null"),
    ] {
        assert_eq!(value_of(column), Some(Value::Text(text.into())), "{column}");
    }
    assert_eq!(value_of(r#"{"name":"a","typeoid":25,"value":null}"#), Some(Value::Null));
}

#[test]
fn type_oids_above_two_billion_are_printed_negative() {
    let image = change(decode(&mut decoder(), 5, &row(r#"{"name":"a","typeoid":-2,"value":1}"#))).new;
    assert_eq!(image.map(|image| image.0[0].type_oid), Some(u32::MAX - 1));
}

#[test]
fn r_lsn_6_rows_are_counted_per_record_and_relation() {
    let mut decoder = decoder();
    let mut n = |start, table: &str| {
        let line = format!(r#"{{"action":"I","schema":"s","table":"{table}","columns":[]}}"#);
        change(decode(&mut decoder, start, &line)).position.n
    };
    // Whether rows of `b` are let through doesn't change what rows of `a` are called.
    assert_eq!([n(5, "a"), n(5, "b"), n(5, "a"), n(5, "b"), n(6, "a"), n(6, "a"), n(5, "a")], [0, 0, 1, 1, 0, 1, 0]);
}

#[test]
fn names_are_shared_between_rows() {
    let mut decoder = decoder();
    let line = row(r#"{"name":"a","typeoid":23,"value":1}"#);
    let (one, two) = (change(decode(&mut decoder, 5, &line)), change(decode(&mut decoder, 6, &line)));
    assert!(Arc::ptr_eq(&one.relation, &two.relation));
    assert!(Arc::ptr_eq(&one.new.unwrap().0[0].name, &two.new.unwrap().0[0].name));
}

#[test]
fn r_dec_3_what_the_new_image_lacks_comes_from_the_old_one() {
    let cell = |name: &str, value: &str| format!(r#"{{"name":"{name}","typeoid":25,"value":"{value}"}}"#);
    let columns = [cell("id", "1"), cell("c", "new")].join(",");
    let identity = [cell("id", "1"), cell("a", "big"), cell("c", "old"), cell("z", "last")].join(",");
    let line = format!(r#"{{"action":"U","schema":"s","table":"t","columns":[{columns}],"identity":[{identity}]}}"#);
    let change = change(decode(&mut decoder(), 5, &line));
    let new: Vec<_> = change.new.unwrap().0.iter().map(|cell| (cell.name.to_string(), cell.value.clone())).collect();
    let expected = [("id", "1"), ("a", "big"), ("c", "new"), ("z", "last")];
    assert_eq!(new, expected.map(|(name, value)| (name.to_owned(), Value::Text(value.into()))));
}

#[test]
fn r_dec_4_what_cannot_be_read_is_skipped_and_names_its_table() {
    let relation = Some(Arc::new(relation("My Schema", "q\"t").unwrap()));
    let mut decoder = decoder();
    let poison = r#"{"action":"I","xid":1,"schema":"My Schema","table":"q\"t","columns":[{"name":"m","type":"My Schema"."Mood","value":"x"}]}"#;
    let expected = LogEvent::Skipped { reason: SkipReason::Malformed, relation: relation.clone() };
    assert_eq!(decode(&mut decoder, 5, poison), expected);
    assert_eq!(decoder.oversize(&poison.as_bytes()[..70]), LogEvent::Skipped { reason: SkipReason::TooLong, relation });
    let latin = Bytes::from_static(b"{\"action\":\"I\",\"schema\":\"s\",\"table\":\"t\",\"columns\":[\xe9]}");
    assert!(matches!(
        decoder.decode(Lsn(5), &latin),
        LogEvent::Skipped { reason: SkipReason::NotUtf8, relation: Some(_) }
    ));
    let nameless = r#"{"action":"I","schema":"s","columns":[]}"#;
    assert_eq!(decode(&mut decoder, 5, nameless), LogEvent::Skipped { reason: SkipReason::BadName, relation: None });
    assert_eq!(decode(&mut decoder, 5, "[]"), LogEvent::Skipped { reason: SkipReason::Malformed, relation: None });
    assert_eq!(decode(&mut decoder, 5, r#"{"action":"M","xid":null,"timestamp":null,"content":""}"#), LogEvent::Other);
    // The stream goes on.
    assert!(matches!(decode(&mut decoder, 6, &row("")), LogEvent::Change(_)));
}

#[test]
fn r_dec_4_a_commit_that_cannot_be_read_still_ends_its_transaction() {
    let mut decoder = decoder();
    let expected = LogEvent::Commit { commit: Lsn(0x156_4f80), end: Lsn(0x156_4fb0) };
    assert_eq!(decode(&mut decoder, 9, r#"{"action":"C","xid":747,"timest"#), expected);
    let orphan = decode(&mut decoder, 10, &row(""));
    assert!(matches!(orphan, LogEvent::Skipped { reason: SkipReason::NoTransaction, relation: Some(_) }));
}

#[test]
fn r_sd_6_rows_behind_a_begin_that_is_passed_over_are_of_no_transaction() {
    let mut decoder = decoder();
    assert_eq!(decoder.pass_over(row("").as_bytes()), Frame::Inside);
    assert!(matches!(decode(&mut decoder, 5, &row("")), LogEvent::Change(_)), "a row alone");
    assert_eq!(decoder.pass_over(COMMIT.as_bytes()), Frame::Commit);
    assert_eq!(decoder.pass_over(BEGIN.as_bytes()), Frame::Begin);
    let orphan = decode(&mut decoder, 10, &row(""));
    assert!(matches!(orphan, LogEvent::Skipped { reason: SkipReason::NoTransaction, relation: Some(_) }));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    #[test]
    fn r_dec_4_no_bytes_make_it_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let mut decoder = decoder();
        decoder.decode(Lsn(1), &Bytes::from(bytes.clone()));
        decoder.oversize(&bytes);
    }

    #[test]
    fn r_dec_4_no_broken_line_makes_it_panic(at in 0usize..300, byte in any::<u8>(), cut in 0usize..300) {
        let line = r#"{"action":"U","xid":748,"timestamp":"2026-11-29 22:43:31.744942+00","lsn":"0/1564FB0","schema":"public","table":"a","columns":[{"name":"id","typeoid":23,"value":1},{"name":"b","typeoid":17,"value":"dead"}],"identity":[{"name":"id","typeoid":23,"value":1}]}"#;
        let mut bytes = line.as_bytes().to_vec();
        if let Some(target) = bytes.get_mut(at) {
            *target = byte;
        }
        bytes.truncate(cut);
        decoder().decode(Lsn(1), &Bytes::from(bytes));
    }

    #[test]
    fn r_dec_2_any_text_comes_out_as_it_went_in(text in any::<String>(), oid in 18u32..) {
        let json = serde_json::to_string(&text).unwrap();
        let oid = oid.cast_signed();
        let column = format!(r#"{{"name":{json},"typeoid":{oid},"value":{json}}}"#);
        let image = change(decode(&mut decoder(), 5, &row(&column))).new.unwrap();
        prop_assert_eq!(&*image.0[0].name, &*text);
        prop_assert_eq!(&image.0[0].value, &Value::Text(text.into()));
        prop_assert_eq!(image.0[0].type_oid, oid.cast_unsigned());
    }
}
