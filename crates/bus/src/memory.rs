//! stub
#[derive(Debug)]
pub struct MemoryBus;
