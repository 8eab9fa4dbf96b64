//! Log lines on their way to a slow reader: a bounded queue, and a thread that writes them.
//!
//! Invariant: once the thread runs, nobody waits for the reader of the log. A line that finds no room is lost and
//! counted, and so is one that cannot be written; the log says how many once it is read again. The lock is never held
//! during a system call on the log.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

/// Memory of waiting lines, with the overhead of each: 8,000 lines of 60 bytes.
const WAITING_BYTES_MAX: usize = 1 << 20;
/// Overhead of a line: its place in the queue, and what an allocation costs.
const LINE_OVERHEAD_BYTES: usize = 64;

/// Lines that wait.
#[derive(Debug)]
pub(super) struct LineQueue {
    waiting: Mutex<WaitingLines>,
    changed: Condvar,
    lost: AtomicU64,
}

#[derive(Debug)]
struct WaitingLines {
    lines: VecDeque<Vec<u8>>,
    bytes: usize,
    has_writer: bool,
    is_writing: bool,
}

impl LineQueue {
    pub(super) const fn new() -> Self {
        let waiting = WaitingLines { lines: VecDeque::new(), bytes: 0, has_writer: false, is_writing: false };
        Self { waiting: Mutex::new(waiting), changed: Condvar::new(), lost: AtomicU64::new(0) }
    }

    fn lock(&self) -> MutexGuard<'_, WaitingLines> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Number of lines that were lost.
    pub(super) fn lost(&self) -> u64 {
        self.lost.load(Ordering::Relaxed)
    }

    /// Queues a line, or loses it. Before there is a thread that writes, it is written at once.
    pub(super) fn push(&self, line: &[u8]) {
        let mut waiting = self.lock();
        if !waiting.has_writer {
            drop(waiting);
            // Nobody is left to be told.
            let _ = io::stderr().write_all(line);
            return;
        }
        let bytes = waiting.bytes + line.len() + LINE_OVERHEAD_BYTES;
        if bytes > WAITING_BYTES_MAX {
            drop(waiting);
            self.lost.fetch_add(1, Ordering::Relaxed);
            return;
        }
        waiting.bytes = bytes;
        waiting.lines.push_back(line.to_vec());
        drop(waiting);
        self.changed.notify_all();
    }

    /// Starts the thread that writes to `log`. `report` is called there with the number of lines that were lost since the
    /// last call, once lines are written again.
    ///
    /// # Errors
    /// If the thread cannot be started.
    pub(super) fn write_from_thread(&'static self, log: File, report: fn(u64)) -> io::Result<()> {
        let mut waiting = self.lock();
        if waiting.has_writer {
            return Ok(());
        }
        thread::Builder::new().name("log".to_owned()).spawn(move || self.write(log, report))?;
        waiting.has_writer = true;
        Ok(())
    }

    fn write(&self, mut log: File, report: fn(u64)) {
        let mut reported = 0;
        loop {
            let line = self.take();
            // A write that fails in the middle of a line loses the line.
            if log.write_all(&line).is_err() {
                self.lost.fetch_add(1, Ordering::Relaxed);
            } else {
                let lost = self.lost();
                if lost > reported && self.lock().lines.is_empty() {
                    report(lost - reported);
                    reported = lost;
                }
            }
            self.lock().is_writing = false;
            self.changed.notify_all();
        }
    }

    fn take(&self) -> Vec<u8> {
        let mut waiting = self.lock();
        loop {
            if let Some(line) = waiting.lines.pop_front() {
                waiting.bytes -= line.len() + LINE_OVERHEAD_BYTES;
                waiting.is_writing = true;
                return line;
            }
            waiting = self.changed.wait(waiting).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Waits until every line is written, `max` at most.
    pub(super) fn flush(&self, max: Duration) {
        let is_busy = |waiting: &mut WaitingLines| waiting.has_writer && (waiting.is_writing || !waiting.lines.is_empty());
        drop(self.changed.wait_timeout_while(self.lock(), max, is_busy));
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead as _, BufReader};
    use std::os::fd::OwnedFd;

    use super::*;

    /// Far longer than anything takes here.
    const LONG: Duration = Duration::from_secs(120);

    fn started(log: impl Into<OwnedFd>) -> &'static LineQueue {
        let queue = Box::leak(Box::new(LineQueue::new()));
        queue.write_from_thread(File::from(log.into()), |_| {}).unwrap();
        queue
    }

    #[test]
    fn nobody_waits_for_the_reader_of_the_log_and_every_lost_line_is_counted() {
        let (reader, writer) = io::pipe().unwrap();
        let queue = started(writer);
        // 6 MB, of which the pipe holds 64 KiB and the queue 1 MiB: without the queue this would never end.
        let pushed = 100_000;
        for n in 0..pushed {
            queue.push(format!("{n:059}\n").as_bytes());
        }
        let lost = queue.lost();
        assert!(lost > 0 && lost < pushed, "{lost}");
        let reading = thread::spawn(move || {
            let mut lines = BufReader::new(reader).lines().map(Result::unwrap);
            let written = lines.by_ref().take(usize::try_from(pushed - lost).unwrap());
            let read: Vec<u64> = written.map(|line| line.parse().unwrap()).collect();
            assert!(read.is_sorted() && read[0] == 0, "whole and in order");
            lines
        });
        let mut lines = reading.join().unwrap();
        queue.flush(LONG);
        queue.push(b"room again\n");
        assert_eq!(lines.next().unwrap(), "room again");
        assert_eq!(queue.lost(), lost);
    }

    #[test]
    fn a_log_that_is_closed_loses_lines_and_holds_nothing_up() {
        let (reader, writer) = io::pipe().unwrap();
        drop(reader);
        let queue = started(writer);
        for _ in 0..3 {
            queue.push(b"to nobody\n");
        }
        queue.flush(LONG);
        assert_eq!(queue.lost(), 3);
    }

    #[test]
    fn waiting_for_lines_that_nobody_reads_ends() {
        let (reader, writer) = io::pipe().unwrap();
        let queue = started(writer);
        for _ in 0..10 {
            queue.push(&[b'x'; 64 * 1024]);
        }
        queue.flush(Duration::from_millis(10));
        assert!(!queue.lock().lines.is_empty());
        drop(reader);
        queue.flush(LONG);
    }
}
