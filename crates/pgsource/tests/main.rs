//! Both halves against a real PostgreSQL with wal2json: replication, and catalogue with visibility.

mod admin;
mod attacks;
mod burdens;
mod conditions;
mod conditions_property;
mod crosstalk;
mod ddl;
mod differential;
mod filters;
mod json;
mod lab;
mod ladder;
mod leftovers;
mod many;
mod pgoutput;
mod pitfalls;
mod places;
mod slots;
mod stream;
mod tenant;
mod tls;
mod transport;
mod visibility;
