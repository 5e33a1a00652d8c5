-- What PostgreSQL itself says. Types, helpers and other tables of all worlds, and the function that asks.
create type shop.mood as enum ('low', 'mid', 'HIGH, "x"', 'select');
create type shop.pair as (a int, b text);
create domain shop.positive as int check (value > 0);
create domain shop.word as text check (value ~ '^[a-z0-9]*$');
create domain shop.must as text not null check (length(value) < 100);
create domain shop.ref as uuid;
create collation shop.ci (provider = icu, locale = 'und-u-ks-level2', deterministic = false);
grant usage on type shop.mood, shop.pair, shop.positive, shop.word, shop.must, shop.ref to public;

create table shop.member (room int, user_id uuid, org text);
create table shop.closed (id int);
revoke select on shop.closed from public;
create table shop.marker (id bigint primary key);

create function shop.me() returns uuid language sql stable as
    $$ select (current_setting('request.jwt.claims', true)::json ->> 'sub')::uuid $$;
create function shop.me_volatile() returns uuid language plpgsql volatile as
    $$ begin return (current_setting('request.jwt.claims', true)::json ->> 'sub')::uuid; end $$;
create function shop.me_definer() returns uuid language plpgsql stable security definer set search_path = '' as
    $$ begin return (current_setting('request.jwt.claims')::jsonb ->> 'sub')::uuid; end $$;
-- Says of itself what isn't true, as people do to have an index used.
create function shop.me_immutable() returns uuid language sql immutable as
    $$ select (current_setting('request.jwt.claims')::jsonb ->> 'sub')::uuid $$;
create function shop.sub_or_null() returns text language plpgsql stable as
    $$ begin return (current_setting('request.jwt.claims')::jsonb ->> 'sub')::uuid::text;
       exception when others then return null; end $$;
create function shop.in_room(int) returns bool language sql stable security definer as
    $$ select exists (select from shop.member m where m.room = $1 and m.user_id = auth.uid()) $$;
create function shop.in_room_plpgsql(int) returns bool language plpgsql stable as
    $$ begin perform from shop.member m where m.room = $1 and m.user_id = auth.uid(); return found; end $$;
create function shop.my_rooms() returns setof int language sql stable security definer as
    $$ select m.room from shop.member m where m.user_id = shop.me() $$;
create function shop.has_org(text) returns bool language sql stable as
    $$ select $1 = any (array(select jsonb_array_elements_text(auth.jwt() -> 'orgs'))) $$;
create function shop.same_org(text, text) returns bool language sql immutable strict as $$ select $1 = $2 $$;

create schema oracle;
-- For each image, put by its INSERT into the table that is else empty, what each identity gets from it: '1', '0', or 'E'
-- and the SQLSTATE. `planned` first plans for claims that no cast fails on, so that only what the row's own evaluation
-- raises is an error. Becomes each identity as the product does.
create function oracle.judge(tab text, images text[], roles text[], words text[], claims text[], planned bool)
returns setof text language plpgsql as $judge$
declare
    image text;
    seen int;
    tame text := '{"sub": "a11ce000-0000-4000-8000-000000000001", "org": "org1", "level": 1, "orgs": [], "rooms": []}';
    sub text;
begin
    foreach image in array images loop
        execute 'delete from ' || tab;
        execute image;
        for who in 1 .. coalesce(array_length(roles, 1), 0) loop
            begin
                sub := case when jsonb_typeof(claims[who]::jsonb -> 'sub') = 'string'
                    then claims[who]::jsonb ->> 'sub' else '' end;
                perform set_config('search_path', '', true), set_config('row_security', 'on', true),
                    set_config('request.headers', '{}', true), set_config('request.cookies', '{}', true),
                    set_config('request.method', 'GET', true), set_config('request.path', '', true),
                    set_config('request.jwt.claim.role', words[who], true);
                perform set_config('role', roles[who], true);
                if planned then
                    perform set_config('plan_cache_mode', 'force_generic_plan', true),
                        set_config('request.jwt.claims', tame, true),
                        set_config('request.jwt.claim.sub', 'a11ce000-0000-4000-8000-000000000001', true);
                    execute 'prepare question as select count(*)::int from ' || tab;
                    execute 'explain execute question';
                end if;
                perform set_config('request.jwt.claims', claims[who], true),
                    set_config('request.jwt.claim.sub', sub, true);
                if planned then
                    execute 'execute question' into seen;
                else
                    -- Functions plan anew, too.
                    discard plans;
                    execute 'select count(*)::int from ' || tab into seen;
                end if;
                -- Takes back every setting.
                raise exception using errcode = 'ORCLE', message = seen::text;
            exception
                when sqlstate 'ORCLE' then return next sqlerrm;
                when others then return next 'E' || sqlstate;
            end;
            if planned then
                deallocate all;
            end if;
        end loop;
    end loop;
end $judge$;
