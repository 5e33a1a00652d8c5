-- Removes what aura-realtime made in this database, the projects' own schemas (project_<id>) with their tables included.
-- Stop it first. Roles belong to the whole server: not while it runs in another database there.
--   psql "$URL" --single-transaction --set ON_ERROR_STOP=1 --file docs/remove.sql

select pg_drop_replication_slot(slot_name) from pg_replication_slots
where database = current_database() and slot_name ~ '^aura_(cdc|dev)_';

do $$
declare
    found record;
begin
    for found in select pubname from pg_publication where pubname ~ '^aura_cdc_[0-9a-f]{8}$' loop
        execute format('drop publication %I', found.pubname);
    end loop;
    for found in select nspname from pg_namespace where nspname ~ '^project_[0-9a-f-]{36}$' loop
        execute format('drop schema %I cascade', found.nspname);
    end loop;
    -- Privileges and policies of theirs go with them. A policy for all of its roles is dropped.
    for found in select rolname from pg_roles
        where rolname ~ '^p_[0-9a-f-]{36}_' or rolname in ('aura_anon', 'aura_authenticated', 'aura_service_role')
    loop
        execute format('drop owned by %I', found.rolname);
        execute format('drop role %I', found.rolname);
    end loop;
end $$;

drop schema if exists aura, aura_source cascade;

-- Fails, as it should, while policies of yours call auth.uid() and its like. Leave it out where auth is somebody else's.
drop function auth.uid(), auth.role(), auth.jwt();
drop schema auth;

-- Statistics of all tables were hidden from those who aren't superusers.
grant select on pg_stats, pg_stats_ext, pg_stats_ext_exprs to public;

-- Tables of yours that were live log whole old rows; `PUT … {"enabled": false}` before would have undone it:
--   alter table todos replica identity default;
