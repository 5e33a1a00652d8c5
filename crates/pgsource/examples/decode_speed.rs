//! Decodes one wal2json line over and over and prints the cost per row: `cargo run --release --example decode_speed`.

use std::time::Instant;

use aura_domain::{Generation, Lsn};
use aura_pgsource::{Decoder, LogEvent, Plugin};
use bytes::Bytes;

const ROWS: u64 = 1_000_000;
const BEGIN: &[u8] =
    br#"{"action":"B","xid":1,"timestamp":"2026-11-29 22:43:31.744691+00","lsn":"0/1","nextlsn":"0/2"}"#;
const UPDATE: &[u8] = br#"{"action":"U","xid":748,"timestamp":"2026-11-29 22:43:31.744942+00","lsn":"0/1564FB0","schema":"public","table":"messages","columns":[{"name":"id","typeoid":20,"value":123456},{"name":"owner","typeoid":2950,"value":"0191d0a0-0000-7000-8000-000000000001"},{"name":"body","typeoid":25,"value":"a line of text, \"quoted\", sixty or so characters long, as usual"},{"name":"seen","typeoid":16,"value":false},{"name":"created_at","typeoid":1184,"value":"2026-11-29 22:43:31.744324+00"}],"identity":[{"name":"id","typeoid":20,"value":123456},{"name":"owner","typeoid":2950,"value":"0191d0a0-0000-7000-8000-000000000001"},{"name":"body","typeoid":25,"value":"the line before"},{"name":"seen","typeoid":16,"value":true},{"name":"created_at","typeoid":1184,"value":"2026-11-29 22:43:31.744324+00"}]}"#;

#[expect(clippy::print_stdout, reason = "a program that prints its measurement")]
fn main() {
    let mut decoder = Decoder::new(Plugin::Wal2json, Generation(1));
    decoder.decode(Lsn(1), &Bytes::from_static(BEGIN));
    let line = Bytes::from_static(UPDATE);
    let begun = Instant::now();
    let rows = (0..ROWS).filter(|row| matches!(decoder.decode(Lsn(*row), &line), LogEvent::Change(_))).count();
    let per_row = begun.elapsed().as_secs_f64() * 1e6 / ROWS as f64;
    println!("{rows} updates of 5 columns with old image, {} bytes each: {per_row:.2} µs a row", UPDATE.len());
}
