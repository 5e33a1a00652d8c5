use std::{io, thread};

use signal_hook::{
    consts::{SIGINT, SIGTERM},
    iterator::Signals,
};

use super::ShutdownHandle;

/// Takes over SIGINT and SIGTERM for the rest of the process's life. A thread of its own hears them: the third one must
/// work while every thread of the runtime is blocked.
pub(super) fn follow(handle: ShutdownHandle) -> io::Result<()> {
    let mut signals = Signals::new([SIGINT, SIGTERM])?;
    let listen = move || {
        for number in signals.forever() {
            // Nor may a log line that blocks, on a pipe that nobody reads, keep the next signal from being heard.
            let heard = handle.clone();
            if thread::Builder::new().spawn(move || heard.signalled(number)).is_err() {
                handle.signalled(number);
            }
        }
    };
    thread::Builder::new().name("signals".to_owned()).spawn(listen).map(drop)
}
