//! The source: a log of transactions, one slot, and a walsender with the measured rules (flow-control.md §4).

use std::collections::VecDeque;

use aura_flow::StatusUpdate;

/// Milliseconds of virtual time.
pub(crate) type Ms = u64;

/// Time from a status being sent to the server's reading it.
const TRANSIT: Ms = 1;
/// A walsender that was in the middle of a transaction notices a closed socket after this (E7b).
const NOTICES: Ms = 126;

/// A row as the log has it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LogRow {
    pub(crate) lsn: u64,
    pub(crate) table: usize,
    pub(crate) bytes: usize,
}

#[derive(Debug)]
pub(crate) struct Transaction {
    /// Start of the commit record.
    pub(crate) commit: u64,
    /// End of it: what is confirmed.
    pub(crate) end: u64,
    pub(crate) rows: Vec<LogRow>,
}

/// What the client reads.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Frame {
    Begin,
    Row { transaction: usize, row: LogRow },
    Commit { end: u64 },
    Keepalive { end: u64, reply: bool },
}

impl Frame {
    fn bytes(&self) -> usize {
        match self {
            Self::Row { row, .. } => row.bytes + 50,
            _ => 50,
        }
    }
}

#[derive(Debug)]
struct Walsender {
    id: u64,
    /// Filter, by table.
    filter: Vec<bool>,
    /// Next transaction, and how much of it was sent: 0 = nothing, n = BEGIN and n - 1 rows.
    at: (usize, usize),
    /// Sent and not read.
    socket: VecDeque<Frame>,
    unread: usize,
    statuses: VecDeque<(Ms, StatusUpdate)>,
    replied: Ms,
    asked: bool,
    known: u64,
    kept: bool,
    copy_done: bool,
    /// Nothing passes in either direction until then.
    cut_until: Ms,
    /// The client has closed; the walsender ends then.
    ends_at: Option<Ms>,
}

/// How a connection ended, as the client sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Gone {
    Closed,
    ShuttingDown,
}

#[derive(Debug)]
pub(crate) struct Source {
    pub(crate) log: Vec<Transaction>,
    pub(crate) wal_end: u64,
    pub(crate) confirmed: u64,
    /// What a crash leaves of it (E12).
    durable: u64,
    pub(crate) lost: bool,
    keep: Option<u64>,
    timeout: Ms,
    window: usize,
    sender: Option<Walsender>,
    /// How the last connection ended, until its client has seen it.
    gone: Option<(u64, Gone)>,
    next_id: u64,
    pub(crate) up_at: Ms,
    /// How often what was confirmed went back.
    pub(crate) restarts: u64,
    pub(crate) sql_down_until: Ms,
    pub(crate) sql_hangs_until: Ms,
    /// The largest flush position that any status carried.
    pub(crate) flushed: u64,
}

impl Source {
    pub(crate) fn new(timeout: Ms, window: usize, keep: Option<u64>) -> Self {
        Self {
            log: Vec::new(),
            wal_end: 1000,
            confirmed: 1000,
            durable: 1000,
            lost: false,
            keep,
            timeout,
            window,
            sender: None,
            gone: None,
            next_id: 1,
            up_at: 0,
            restarts: 0,
            sql_down_until: 0,
            sql_hangs_until: 0,
            flushed: 0,
        }
    }

    /// A transaction commits. Rows are (table, bytes).
    pub(crate) fn commit(&mut self, rows: &[(usize, usize)]) -> u64 {
        let rows: Vec<_> = rows
            .iter()
            .map(|(table, bytes)| {
                self.wal_end += *bytes as u64 + 20;
                LogRow { lsn: self.wal_end, table: *table, bytes: *bytes }
            })
            .collect();
        let commit = self.wal_end + 8;
        self.wal_end += 48;
        self.log.push(Transaction { commit, end: self.wal_end, rows });
        self.lose();
        commit
    }

    /// Others write; nothing of it is for us.
    pub(crate) fn foreign(&mut self, bytes: u64) {
        self.wal_end += bytes;
        self.lose();
    }

    fn lose(&mut self) {
        if self.keep.is_some_and(|keep| self.wal_end - self.confirmed > keep) {
            self.lost = true;
            self.end(Gone::Closed);
        }
    }

    pub(crate) fn timeout(&self) -> Ms {
        self.timeout
    }

    pub(crate) fn is_up(&self, now: Ms) -> bool {
        now >= self.up_at
    }

    /// SQL answers.
    pub(crate) fn sql(&self, now: Ms) -> bool {
        self.sql_connects(now) && now >= self.sql_hangs_until
    }

    /// A login can connect.
    pub(crate) fn sql_connects(&self, now: Ms) -> bool {
        self.is_up(now) && now >= self.sql_down_until
    }

    pub(crate) fn is_active(&self) -> bool {
        self.sender.is_some()
    }

    /// START_REPLICATION; `None` = 55006, or the server is away.
    pub(crate) fn start(&mut self, start: u64, filter: Vec<bool>, now: Ms) -> Option<u64> {
        if self.sender.is_some() || !self.is_up(now) || self.lost {
            return None;
        }
        let from = start.max(self.confirmed);
        let at = self.log.partition_point(|transaction| transaction.end <= from);
        let id = self.next_id;
        self.next_id += 1;
        self.sender = Some(Walsender {
            id,
            filter,
            at: (at, 0),
            socket: VecDeque::new(),
            unread: 0,
            statuses: VecDeque::new(),
            replied: now,
            asked: false,
            known: 0,
            kept: false,
            copy_done: false,
            cut_until: 0,
            ends_at: None,
        });
        Some(id)
    }

    /// Drops the lost slot and makes a new one: what is before it is never seen.
    pub(crate) fn recreate(&mut self) {
        self.lost = false;
        (self.confirmed, self.durable) = (self.wal_end, self.wal_end);
    }

    fn sender(&mut self, id: u64) -> Option<&mut Walsender> {
        self.sender.as_mut().filter(|sender| sender.id == id && sender.ends_at.is_none())
    }

    /// Whether the connection lives; else how it ended, after what was in the socket was read.
    pub(crate) fn gone(&self, id: u64) -> Option<Gone> {
        self.gone.filter(|(gone, _)| *gone == id).map(|(_, how)| how)
    }

    /// Whether there is something to read.
    pub(crate) fn readable(&self, id: u64, now: Ms) -> bool {
        let sender = self.sender.as_ref().filter(|sender| sender.id == id && now >= sender.cut_until);
        self.gone(id).is_some() || sender.is_some_and(|sender| !sender.socket.is_empty())
    }

    /// The next frame.
    pub(crate) fn read(&mut self, id: u64, now: Ms) -> Option<Frame> {
        let sender = self.sender(id).filter(|sender| now >= sender.cut_until)?;
        let frame = sender.socket.pop_front()?;
        sender.unread -= frame.bytes();
        Some(frame)
    }

    pub(crate) fn status(&mut self, id: u64, status: StatusUpdate, now: Ms) {
        self.flushed = self.flushed.max(status.flushed.0);
        if let Some(sender) = self.sender(id) {
            let at = (now + TRANSIT).max(sender.cut_until);
            sender.statuses.push_back((at, status));
        }
    }

    pub(crate) fn copy_done(&mut self, id: u64) {
        if let Some(sender) = self.sender(id) {
            sender.copy_done = true;
        }
    }

    /// The client closes. With unread bytes the server meets a reset when it sends next, and reads no status any more (E4).
    pub(crate) fn close(&mut self, id: u64, now: Ms) {
        let Some(sender) = self.sender.as_mut().filter(|sender| sender.id == id) else { return };
        if sender.unread > 0 {
            sender.statuses.clear();
        }
        let busy = sender.unread > 0 || sender.at.1 > 0;
        sender.ends_at = Some(now + if busy { NOTICES } else { TRANSIT + 1 });
    }

    pub(crate) fn cut(&mut self, until: Ms) {
        if let Some(sender) = &mut self.sender {
            sender.cut_until = until;
        }
    }

    fn end(&mut self, how: Gone) {
        if let Some(sender) = self.sender.take() {
            self.gone = Some((sender.id, how));
        }
    }

    /// `pg_terminate_backend`.
    pub(crate) fn terminate(&mut self) {
        self.end(Gone::Closed);
    }

    /// What is confirmed reaches the disk.
    pub(crate) fn checkpoint(&mut self) {
        self.durable = self.confirmed;
    }

    /// Away for a while; what was confirmed lately is forgotten (E12), after a clean stop, too.
    pub(crate) fn restart(&mut self, clean: bool, up_at: Ms) {
        self.end(if clean { Gone::ShuttingDown } else { Gone::Closed });
        self.confirmed = self.durable;
        self.restarts += 1;
        self.up_at = up_at;
    }

    /// What the walsender does now.
    pub(crate) fn run(&mut self, now: Ms) {
        let Some(sender) = &mut self.sender else { return };
        while sender.statuses.front().is_some_and(|(at, _)| *at <= now) {
            let (_, status) = sender.statuses.pop_front().expect("just seen");
            (sender.replied, sender.asked, sender.kept) = (now, false, false);
            sender.known = sender.known.max(status.written.0);
            assert!(status.flushed.0 <= self.wal_end, "never acknowledge beyond the server's end (R-ENG-8)");
            self.confirmed = self.confirmed.max(status.flushed.0);
            if status.ask {
                let end = sender.position(&self.log, self.wal_end);
                sender.push(Frame::Keepalive { end, reply: false });
            }
        }
        if sender.ends_at.is_some_and(|at| now >= at) {
            self.sender = None;
            return;
        }
        if now >= sender.replied + self.timeout {
            return self.end(Gone::Closed);
        }
        sender.send(&self.log, self.window);
        let caught_up = sender.at.0 == self.log.len();
        if now >= sender.replied + self.timeout / 2 && !sender.asked {
            sender.asked = true;
            // Behind whatever is in the socket (E3).
            let end = sender.position(&self.log, self.wal_end);
            sender.push(Frame::Keepalive { end, reply: true });
        } else if caught_up && !sender.kept && sender.known < self.wal_end {
            sender.kept = true;
            sender.push(Frame::Keepalive { end: self.wal_end, reply: false });
        }
        // CopyDone ends the stream, but not in the middle of a transaction (E7).
        if sender.copy_done && sender.at.1 == 0 {
            self.end(Gone::Closed);
        }
    }

    /// When [`Self::run`] has something to do.
    pub(crate) fn due(&self, now: Ms) -> Option<Ms> {
        let sender = self.sender.as_ref()?;
        let status = sender.statuses.front().map(|(at, _)| *at);
        let ask = if sender.asked { self.timeout } else { self.timeout / 2 };
        let heals = Some(sender.cut_until).filter(|at| *at > now);
        [status, sender.ends_at, Some(sender.replied + ask), heals].into_iter().flatten().min()
    }
}

impl Walsender {
    fn push(&mut self, frame: Frame) {
        self.unread += frame.bytes();
        self.socket.push_back(frame);
    }

    /// sentPtr.
    fn position(&self, log: &[Transaction], wal_end: u64) -> u64 {
        match log.get(self.at.0) {
            None => wal_end,
            Some(transaction) if self.at.1 > 1 => transaction.rows[self.at.1 - 2].lsn,
            Some(_) => self.at.0.checked_sub(1).map_or(0, |before| log[before].end),
        }
    }

    /// As much as the socket takes.
    fn send(&mut self, log: &[Transaction], window: usize) {
        while self.unread < window && self.ends_at.is_none() {
            let Some(transaction) = log.get(self.at.0) else { return };
            if self.copy_done && self.at.1 == 0 {
                return;
            }
            let frame = match self.at.1 {
                0 => Some(Frame::Begin),
                n => transaction.rows.get(n - 1).map(|row| Frame::Row { transaction: self.at.0, row: *row }),
            };
            self.at.1 += 1;
            match frame {
                Some(Frame::Row { row, .. }) if !self.filter[row.table] => {}
                Some(frame) => self.push(frame),
                None => {
                    self.push(Frame::Commit { end: transaction.end });
                    self.at = (self.at.0 + 1, 0);
                }
            }
        }
    }
}
