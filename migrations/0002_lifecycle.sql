-- Engines that are stopped, watched and shared out among a pool of workers.

alter table aura.sources
    -- auto: a lost or missing slot is made again, with an announced gap (R-ENG-8). manual: the engine fails until asked.
    add column slot_recreate text not null default 'auto',
    add constraint sources_slot_recreate_check check (slot_recreate in ('auto', 'manual'));

alter table aura.engines
    -- Worker that raised the epoch; null once it has left, or the api has fenced it.
    add column holder text,
    -- The open stop or force-close; all null when there is none (R-ENG-3).
    add column operation_id bigint,
    add column operation text,
    add column operation_started_at timestamptz,
    add column operation_deadline_at timestamptz,
    add column operation_on_deadline text,
    -- An operator asked for a new slot in place of a lost one.
    add column recreate_slot boolean not null default false,
    -- EngineReport of the last run.
    add column last_report jsonb,
    -- EngineLive of the present run, and when it was written: stale when the worker is gone.
    add column live jsonb,
    add column live_at timestamptz,
    add constraint engines_operation_check check (operation in ('stop', 'force-close')),
    add constraint engines_on_deadline_check check (operation_on_deadline in ('force', 'abandon'));
create sequence aura.engine_operations;

-- The pool (R-LEASE-3); the database's clock only.
create table aura.workers (
    id text primary key,
    host text not null,
    version text not null,
    -- CDC_MAX_ENGINES.
    max_engines integer not null,
    -- It leaves: it takes no source, and its sources are to be taken.
    draining boolean not null default false,
    started_at timestamptz not null default clock_timestamp(),
    heartbeat_at timestamptz not null default clock_timestamp()
);

-- Positions at which a worker panicked (R-SD-6): the third time it is skipped with a gap.
create table aura.panics (
    source_id uuid not null references aura.sources (id) on delete cascade,
    position text not null,
    count integer not null default 1,
    last_at timestamptz not null default now(),
    primary key (source_id, position)
);
