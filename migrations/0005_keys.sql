-- Keys and secrets are replaced with an overlap, in which the old ones are good beside the new.

comment on column aura.keys.revoked_at is 'From when it is refused: in the future while it is being replaced.';

-- Secrets that signed keys and end users' tokens before the present one.
create table aura.retired_secrets (
    id uuid primary key,
    project_id uuid not null references aura.projects (id) on delete cascade,
    -- Sealed, as it was in aura.projects.
    jwt_secret bytea not null,
    -- From when what it signed is refused.
    valid_until timestamptz not null
);
create index retired_secrets_project_idx on aura.retired_secrets (project_id);
