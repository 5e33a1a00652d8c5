use aura_domain::{Epoch, Position, SourceId};

use crate::{Store, StoreError, bounded, decode::word};

/// Panics at one position before it is skipped (R-SD-6).
pub const PANICS_BEFORE_SKIP: i32 = 3;

impl Store {
    /// Notes that a worker panicked at a position; answers how often that has happened. Positions that were not met for a
    /// week are forgotten.
    pub async fn note_panic(&self, source: SourceId, epoch: Epoch, position: Position) -> Result<i32, StoreError> {
        let query = sqlx::query_scalar::<_, i32>(
            "with fence as (select source_id from aura.engines where source_id = $1 and epoch = $2 for no key update),
                old as (delete from aura.panics where source_id = $1 and last_at < now() - interval '7 days')
             insert into aura.panics as p (source_id, position) select source_id, $3 from fence
             on conflict (source_id, position) do update set count = p.count + 1, last_at = now() returning p.count",
        );
        let query = query.bind(source.0).bind(epoch.0).bind(position.to_string());
        bounded(async { query.fetch_optional(&self.pool).await?.ok_or(StoreError::Fenced) }).await
    }

    /// Positions at which [`PANICS_BEFORE_SKIP`] panics have happened.
    pub async fn positions_to_skip(&self, source: SourceId) -> Result<Vec<Position>, StoreError> {
        let query =
            sqlx::query_scalar::<_, String>("select position from aura.panics where source_id = $1 and count >= $2");
        let query = query.bind(source.0).bind(PANICS_BEFORE_SKIP);
        let rows = bounded(async { Ok(query.fetch_all(&self.pool).await?) }).await?;
        rows.iter().map(|text| word(text, "position")).collect()
    }
}
