-- The types of $1 and all they are made of. Domains lead to their base, arrays to their elements.
with recursive wanted (oid) as (
    select unnest($1)
    union
    select part.oid
    from wanted
    join pg_type t on t.oid = wanted.oid
    cross join lateral (values (t.typbasetype), (case when t.typcategory = 'A' then t.typelem else 0 end)) part (oid)
    where part.oid <> 0
)
select t.oid::int8, t.typname::text, t.typbasetype::int8,
    case when t.typcategory = 'A' then t.typelem else 0 end::int8, t.typdelim::text,
    -- What to_jsonb goes by: a cast to json that is a function. Of those only hstore's is known here.
    t.typname = 'hstore' and exists (select from pg_cast c
        where c.castsource = t.oid and c.casttarget = 'json'::regtype and c.castmethod = 'f')
from wanted join pg_type t on t.oid = wanted.oid
