-- Projects that are changed and deleted, versions for If-Match, requests that are answered once.

alter table aura.sources
    -- Raised by each change of what the API sets: the ETag.
    add column version bigint not null default 1;

alter table aura.projects
    -- Raised by each change of what the API sets: the ETag.
    add column version bigint not null default 1,
    -- Of a deleted one: its schema is to go, too.
    add column drop_schema boolean not null default false,
    -- Of a deleted one: what we made for it in its source is gone. Null: it is still to be taken back.
    add column cleaned_at timestamptz;
create index projects_uncleaned_idx on aura.projects (deleted_at) where deleted_at is not null and cleaned_at is null;

-- Answers to requests with an Idempotency-Key, for 24 h.
create table aura.idempotency (
    -- Who asked: a key is its asker's own.
    scope text not null,
    -- Hash of the key.
    key bytea not null,
    -- Hash of method, path and body.
    fingerprint bytea not null,
    -- Id of what the request makes: the same however often it is tried.
    ticket uuid not null,
    -- Somebody works on it until then.
    locked_until timestamptz,
    -- Sealed: it holds keys. Null: not answered yet.
    answer bytea,
    created_at timestamptz not null default now(),
    primary key (scope, key)
);
create index idempotency_created_idx on aura.idempotency (created_at);

-- The whole installation's log is paged, too.
create index audit_action_idx on aura.audit (action, id desc);
