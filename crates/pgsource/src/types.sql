-- The types of $1 and all they are made of. Domains lead to their base, arrays to their elements, composites to their
-- attributes.
with recursive wanted (oid) as (
    select unnest($1)
    union
    select part.oid
    from wanted
    join pg_type t on t.oid = wanted.oid
    cross join lateral (
        values (t.typbasetype), (case when t.typcategory = 'A' then t.typelem else 0 end)
        union all
        select a.atttypid from pg_attribute a
        where t.typtype = 'c' and a.attrelid = t.typrelid and a.attnum > 0 and not a.attisdropped
    ) part (oid)
    where part.oid <> 0
)
select t.oid::int8, t.typname::text, t.typbasetype::int8,
    case when t.typcategory = 'A' then t.typelem else 0 end::int8, t.typdelim::text,
    -- What to_jsonb goes by: a cast to json that is a function. Of those only hstore's is known here.
    t.typname = 'hstore' and exists (select from pg_cast c
        where c.castsource = t.oid and c.casttarget = 'json'::regtype and c.castmethod = 'f'),
    case when t.typtype = 'c' then array(
        select json_build_array(a.attname, a.atttypid::int8)::text from pg_attribute a
        where a.attrelid = t.typrelid and a.attnum > 0 and not a.attisdropped order by a.attnum) end
from wanted join pg_type t on t.oid = wanted.oid
