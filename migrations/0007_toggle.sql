-- The toggle: who sees to a table's replica identity, its last event, and what the reconciler looks for.

alter table aura.realtime_tables
    -- auto: we ALTER and restore; manual: its owner does, and we only look (R-REG-4).
    add column mode text not null default 'auto',
    -- When its last change was published, to within some seconds; by the worker.
    add column last_event_at timestamptz,
    add constraint realtime_tables_mode_check check (mode in ('auto', 'manual'));

-- The OID leads (R-REG-2).
create index realtime_tables_oid_idx on aura.realtime_tables (source_id, table_oid);

-- What a crash or a lock left half done (R-REG-3): few, whatever the number of tables.
create index realtime_tables_unfinished_idx on aura.realtime_tables (updated_at)
    where (enabled and not identity_set) or (not enabled and previous_identity is not null);
