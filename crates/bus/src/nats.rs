//! stub
#[derive(Debug)]
pub struct NatsBus;
#[derive(Debug)]
pub struct NatsOptions;
