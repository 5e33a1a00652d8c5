-- The partitions that hold a registered partitioned table's rows: the log names them, not the table (R-REG-4, R-HOLE-4).

create table aura.realtime_partitions (
    registration_id uuid not null references aura.realtime_tables (id) on delete cascade,
    -- The OID leads, as a table's does.
    partition_oid oid not null,
    schema_name text not null,
    table_name text not null,
    -- relreplident (d, n, f, i) and index before we set FULL, to restore on disable.
    previous_identity text,
    previous_identity_index text,
    -- False: it was found later than the table was enabled, so rows may have been missed, and that is yet to be announced.
    told boolean not null,
    -- It was found detached or dropped: what was written before may still be read, up to here.
    gone_at_lsn pg_lsn,
    gone_generation integer,
    primary key (registration_id, partition_oid)
);
create index realtime_partitions_oid_idx on aura.realtime_partitions (partition_oid);
