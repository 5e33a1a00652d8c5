-- Run by the admin role, any number of times. What is there already, made by somebody else, stays as it is.
do $bootstrap$
declare
    name text;
begin
    foreach name in array array['aura_anon', 'aura_authenticated', 'aura_service_role'] loop
        if not exists (select from pg_catalog.pg_roles where rolname = name) then
            begin
                execute pg_catalog.format('create role %I nologin', name);
            exception when duplicate_object or unique_violation then
                null; -- another bootstrap was faster
            end;
        end if;
    end loop;

    if not exists (select from pg_catalog.pg_namespace where nspname = 'auth') then
        create schema auth;
        -- Whoever writes a policy must be able to name the functions.
        grant usage on schema auth to public;
    end if;
    if pg_catalog.pg_has_role((select nspowner from pg_catalog.pg_namespace where nspname = 'auth'), 'USAGE') then
        grant usage on schema auth to aura_anon, aura_authenticated, aura_service_role;
    end if;

    -- The claims of whom a row is judged for. '' counts as absent: so a setting reads after the transaction that made it.
    if to_regprocedure('auth.jwt()') is null then
        create function auth.jwt() returns jsonb language sql stable as $$
            select coalesce(nullif(current_setting('request.jwt.claim', true), ''),
                nullif(current_setting('request.jwt.claims', true), ''))::jsonb
        $$;
    end if;
    if to_regprocedure('auth.uid()') is null then
        create function auth.uid() returns uuid language sql stable as $$
            select coalesce(nullif(current_setting('request.jwt.claim.sub', true), ''),
                nullif(current_setting('request.jwt.claims', true), '')::jsonb ->> 'sub')::uuid
        $$;
    end if;
    if to_regprocedure('auth.role()') is null then
        create function auth.role() returns text language sql stable as $$
            select coalesce(nullif(current_setting('request.jwt.claim.role', true), ''),
                nullif(current_setting('request.jwt.claims', true), '')::jsonb ->> 'role')
        $$;
    end if;

    -- Judges images for one identity after the other: they are loaded once, and each identity is become as it is when it
    -- is asked alone (visibility/statement.rs). It runs as its caller, so calling it gives nobody anything.
    if not exists (select from pg_catalog.pg_namespace where nspname = 'aura_source') then
        create schema aura_source;
    end if;
    if pg_catalog.pg_has_role((select nspowner from pg_catalog.pg_namespace where nspname = 'aura_source'), 'USAGE') then
        grant usage on schema aura_source to aura_anon, aura_authenticated;
        create or replace function aura_source.judge(
            query text, images anyarray, claims text[], subjects text[], role_name text, word text, time_limit text,
            pair_who int8[], pair_image int8[])
        returns table (who int8, seen int8[]) language plpgsql as $judge$
        declare
            mine images%type := images;
            first int := 1;
            last int;
        begin
            for n in 1 .. pg_catalog.cardinality(claims) loop
                -- What the identity before left behind.
                reset all;
                perform pg_catalog.set_config('role', role_name, true),
                    pg_catalog.set_config('search_path', '', true),
                    pg_catalog.set_config('row_security', 'on', true),
                    pg_catalog.set_config('jit', 'off', true),
                    pg_catalog.set_config('statement_timeout', time_limit, true),
                    pg_catalog.set_config('request.jwt.claims', claims[n], true),
                    pg_catalog.set_config('request.jwt.claim.role', word, true),
                    pg_catalog.set_config('request.jwt.claim.sub', subjects[n], true),
                    pg_catalog.set_config('request.headers', '{}', true),
                    pg_catalog.set_config('request.cookies', '{}', true),
                    pg_catalog.set_config('request.method', 'GET', true),
                    pg_catalog.set_config('request.path', '', true);
                if pair_who is not null then
                    -- Only the images that matter to the identity: its pairs are together, in order.
                    last := first;
                    while pair_who[last] = n loop
                        last := last + 1;
                    end loop;
                    mine := array(select images[pair.image]
                        from pg_catalog.unnest(pair_image[first:last - 1]) with ordinality as pair (image, place)
                        order by pair.place);
                    first := last;
                end if;
                execute query into seen using mine;
                who := n;
                return next;
            end loop;
        end
        $judge$;
    end if;
end
$bootstrap$;
