-- What failed is tried again at once when an operator asks for it.

alter table aura.engines
    -- Starts and new slots that were asked for.
    add column nudges bigint not null default 0;
