-- A registration follows its table through a rename (R-REG-2); what came in between is lost, and must be told (R-HOLE-4).

alter table aura.realtime_tables
    -- Its name before it was renamed, moved or dropped, until that is announced.
    add column changed_from text;
