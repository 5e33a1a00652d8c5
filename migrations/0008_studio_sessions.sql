-- Studio's sessions live on the server (R-SEC-5): a browser has nothing but a cookie that no page can read.

create table aura.studio_sessions (
    -- SHA-256 of the cookie: who reads this table can't sign in.
    id_hash bytea primary key,
    -- The key that the session was opened with, sealed; verified anew at each request, so it ends with the key.
    token bytea not null,
    created_at timestamptz not null default now(),
    expires_at timestamptz not null
);
