/// x
fn main() {}
