-- The platform database. Everything lives in schema "aura", so that it may share a database with others.
-- Applied files are immutable; changes go expand -> migrate -> contract in later files.

create schema if not exists aura;

-- One Postgres server, database and logical slot.
create table aura.sources (
    id uuid primary key,
    name text not null,
    -- Sealed with the master key: URLs hold passwords.
    replication_url bytea not null,
    -- Null: the replication URL serves.
    admin_url bytea,
    slot_name text not null,
    -- auto | wal2json | pgoutput
    plugin text not null default 'auto',
    -- Raised in the transaction of each change of a registration: the engine's copy of the registry is as new as the
    -- number it reports. The row lock puts these transactions in order.
    registry_revision bigint not null default 0,
    created_at timestamptz not null default now(),
    constraint sources_name_key unique (name),
    constraint sources_plugin_check check (plugin in ('auto', 'wal2json', 'pgoutput'))
);

create table aura.projects (
    id uuid primary key,
    name text not null,
    source_id uuid not null references aura.sources (id),
    -- Physical main schema, the client's "public".
    schema_name text not null,
    -- Sealed: HS256 secret of the project's keys and end users' tokens.
    jwt_secret bytea not null,
    -- Sealed: password of the visibility login of R-RLS-9.
    visibility_password bytea not null,
    -- limits, jwks_url, aud, roles, schemas, require_rls, private_only
    settings jsonb not null default '{}',
    created_at timestamptz not null default now(),
    updated_at timestamptz not null default now(),
    deleted_at timestamptz
);
create unique index projects_name_key on aura.projects (name) where deleted_at is null;
create unique index projects_schema_key on aura.projects (source_id, schema_name) where deleted_at is null;

-- API keys are JWTs; `kid` names the row, so that a key can be revoked.
create table aura.keys (
    id uuid primary key,
    project_id uuid not null references aura.projects (id) on delete cascade,
    -- anon | service_role
    role text not null,
    created_at timestamptz not null default now(),
    revoked_at timestamptz,
    constraint keys_role_check check (role in ('anon', 'service_role'))
);
create index keys_project_idx on aura.keys (project_id);

-- Desired state of one table (T, R-REG).
create table aura.realtime_tables (
    id uuid primary key,
    project_id uuid not null references aura.projects (id) on delete cascade,
    source_id uuid not null references aura.sources (id),
    -- Physical names; the OID leads (R-REG-2).
    schema_name text not null,
    table_name text not null,
    table_oid oid not null,
    enabled boolean not null,
    -- pending | active | blocked | missing | disabled; observed, except that the api writes pending and disabled.
    status text not null default 'pending',
    reason text,
    -- The ALTER has committed; only such registrations enter the filter (R-HOLE-3).
    identity_set boolean not null default false,
    -- relreplident (d, n, f, i) and index before we set FULL, to restore on disable.
    previous_identity text,
    previous_identity_index text,
    -- R-REG-3: read after the ALTER under its lock; set from off to on only.
    enabled_at_lsn pg_lsn,
    enabled_generation integer,
    -- R-REG-8: rows committed above it are never published.
    disabled_at_lsn pg_lsn,
    disabled_generation integer,
    -- R-HOLE-2: max(enabled_at_lsn, E), by the worker.
    active_since_lsn pg_lsn,
    -- sources.registry_revision of the last change of desired state.
    revision bigint not null,
    created_at timestamptz not null default now(),
    updated_at timestamptz not null default now(),
    updated_by text not null,
    constraint realtime_tables_name_key unique (project_id, schema_name, table_name),
    constraint realtime_tables_status_check check (status in ('pending', 'active', 'blocked', 'missing', 'disabled'))
);
create index realtime_tables_source_idx on aura.realtime_tables (source_id);

-- Desired and observed state of a source's engine, and its fencing token.
create table aura.engines (
    source_id uuid primary key references aura.sources (id) on delete cascade,
    desired text not null default 'running',
    state text not null default 'stopped',
    reason text,
    since timestamptz not null default now(),
    -- R-LEASE-2: raised after the lease is won; every write of a worker is "where epoch = $n".
    epoch bigint not null default 0,
    -- R-LSN-6.
    generation integer not null default 1,
    system_identifier text,
    timeline integer,
    -- Sources' registry_revision that the running filter and the exact check hold (200 of a PUT).
    applied_revision bigint not null default 0,
    constraint engines_desired_check check (desired in ('running', 'stopped')),
    constraint engines_state_check check (state in ('stopped', 'starting', 'running', 'backoff', 'draining', 'closing',
        'force_closing', 'zombie', 'failed'))
);

-- Postgres back end of the leases; the database's clock only (R-LEASE-2).
create table aura.leases (
    name text primary key,
    holder text,
    -- Raised by every acquisition: compare-and-set.
    version bigint not null default 0,
    duration_ms bigint not null,
    renewed_at timestamptz not null default clock_timestamp()
);

-- What the engine confirmed last, for operators and for starting above a slot that went back (R-LSN-7).
create table aura.source_positions (
    source_id uuid primary key references aura.sources (id) on delete cascade,
    generation integer not null,
    confirmed_lsn pg_lsn not null,
    epoch bigint not null,
    updated_at timestamptz not null default now()
);

-- Announced losses.
create table aura.gaps (
    id bigint generated always as identity primary key,
    source_id uuid not null references aura.sources (id) on delete cascade,
    project_id uuid references aura.projects (id) on delete cascade,
    from_position text,
    to_position text,
    reason text not null,
    epoch bigint not null,
    created_at timestamptz not null default now()
);
create index gaps_source_idx on aura.gaps (source_id, id desc);

-- Append-only: who changed what.
create table aura.audit (
    id bigint generated always as identity primary key,
    at timestamptz not null default now(),
    project_id uuid,
    -- Key id and role, or "platform".
    actor text not null,
    action text not null,
    target text not null,
    before jsonb,
    after jsonb,
    request_id text
);
create index audit_project_idx on aura.audit (project_id, id desc);
