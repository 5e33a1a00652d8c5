//! Whether the transactions of a batch are visible yet (R-RLS-10). The log is read before the commit is visible to
//! others: with synchronous replication by as long as the standby takes.

/// `pg_current_snapshot()`, parsed.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Snapshot {
    /// First transaction id, 64 bit, that was not assigned yet.
    xmax: u64,
    /// Those below that were still running.
    running: Vec<u64>,
}

/// Transaction ids 0, 1 and 2 are invalid, bootstrap and frozen: nobody waits for them.
const FIRST_NORMAL_XID: u32 = 3;

impl Snapshot {
    /// Parses the text form, `xmin:xmax:xip,xip,…`.
    pub(super) fn parse(text: &str) -> Option<Self> {
        let mut parts = text.splitn(3, ':');
        let _xmin: u64 = parts.next()?.parse().ok()?;
        let xmax = parts.next()?.parse().ok()?;
        let running = parts.next()?.split(',').filter(|xid| !xid.is_empty());
        Some(Self { xmax, running: running.map(str::parse).collect::<Result<_, _>>().ok()? })
    }

    /// Whether the log's 32-bit transaction id is committed and visible in this snapshot.
    pub(super) fn sees(&self, xid: u32) -> bool {
        if xid < FIRST_NORMAL_XID {
            return true;
        }
        let full = self.widen(xid);
        full < self.xmax && !self.running.contains(&full)
    }

    /// The 64-bit id nearest to xmax that ends in these 32 bits: ids in use never span more than 2^31.
    fn widen(&self, xid: u32) -> u64 {
        const EPOCH: u64 = 1 << 32;
        let near = (self.xmax & !(EPOCH - 1)) | u64::from(xid);
        if near > self.xmax + EPOCH / 2 {
            near.saturating_sub(EPOCH)
        } else if near + EPOCH / 2 < self.xmax {
            near + EPOCH
        } else {
            near
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn r_rls_10_running_and_future_transactions_are_not_visible() {
        let snapshot = Snapshot::parse("10:20:10,15").expect("a snapshot");
        let seen: Vec<u32> = (8..23).filter(|xid| snapshot.sees(*xid)).collect();
        assert_eq!(seen, [8, 9, 11, 12, 13, 14, 16, 17, 18, 19]);
        assert_eq!(Snapshot::parse("7:7:").map(|s| (s.sees(6), s.sees(7))), Some((true, false)));
    }

    #[test]
    fn r_rls_10_transaction_ids_wrap_around() {
        let base = 5_u64 << 32;
        let text = format!("{}:{}:{}", base - 4, base + 10, base - 2);
        let snapshot = Snapshot::parse(&text).expect("a snapshot");
        assert!(snapshot.sees(u32::MAX), "just before the wrap");
        assert!(!snapshot.sees(u32::MAX - 1), "running, before the wrap");
        assert!(snapshot.sees(9));
        assert!(!snapshot.sees(10), "not assigned yet");
        let before = Snapshot::parse(&format!("{0}:{0}:", base - 5)).expect("a snapshot");
        assert!(!before.sees(7), "assigned after the wrap that is still to come");
    }

    #[test]
    fn what_is_not_a_snapshot_is_refused() {
        for text in ["", "1", "1:2", "a:b:", "1:2:x"] {
            assert_eq!(Snapshot::parse(text), None, "{text:?}");
        }
    }
}
