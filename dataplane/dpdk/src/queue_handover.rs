//! The hand-over of a port's queues to a polling worker when the device appears, and back when it disappears.
//!
//! Invariant: queues have one owner at any time, the worker or the hotplug task. The worker never waits and makes no
//! system call for a hand-over: a poll reads one word that is not written while nothing changes. Deliberately not here:
//! devices and when they appear (`hotplug`).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crossbeam_queue::ArrayQueue;
use dpdk_sys::{RxQueue, TxQueue};

/// Commands that may wait: one of each kind, and as many again.
const COMMANDS_MAX: usize = 4;

/// One worker's queues of a port.
#[derive(Debug)]
pub struct QueuePair {
    /// Its receive queue; none if the device has fewer queues than there are workers.
    pub rx: Option<RxQueue>,
    /// Its transmit queue, likewise.
    pub tx: Option<TxQueue>,
}

/// A command to a worker about its queues of a port.
#[derive(Debug)]
enum QueueCommand<Q> {
    Take(Q),
    GiveBack,
    Run(fn(&mut Q)),
}

#[derive(Debug)]
struct HandOver<Q> {
    commands: ArrayQueue<QueueCommand<Q>>,
    returned: ArrayQueue<Q>,
    has_commands: AtomicBool,
}

/// The hotplug task's side: one for each worker and port.
#[derive(Debug)]
pub struct QueueSender<Q = QueuePair>(Arc<HandOver<Q>>);

/// The worker's side.
#[derive(Debug)]
pub struct QueueReceiver<Q = QueuePair> {
    queues: Option<Q>,
    shared: Arc<HandOver<Q>>,
}

/// Both sides of a hand-over, without queues yet.
#[must_use]
pub fn channel<Q>() -> (QueueSender<Q>, QueueReceiver<Q>) {
    let shared = Arc::new(HandOver {
        commands: ArrayQueue::new(COMMANDS_MAX),
        returned: ArrayQueue::new(COMMANDS_MAX),
        has_commands: AtomicBool::new(false),
    });
    (QueueSender(Arc::clone(&shared)), QueueReceiver { queues: None, shared })
}

impl<Q> QueueSender<Q> {
    /// Hands queues to the worker, which uses them from its next poll on. Its old queues come back.
    ///
    /// # Errors
    /// Returns the queues if too many commands wait, because the worker has not handled earlier ones.
    pub fn send(&self, queues: Q) -> Result<(), Q> {
        let sent = self.0.commands.push(QueueCommand::Take(queues));
        self.0.has_commands.store(true, Ordering::Release);
        sent.or_else(|command| match command {
            QueueCommand::Take(queues) => Err(queues),
            QueueCommand::GiveBack | QueueCommand::Run(_) => Ok(()),
        })
    }

    /// Asks for the queues; [`QueueSender::returned`] has them after the worker's next poll. False: too many commands
    /// wait.
    #[must_use]
    pub fn recall(&self) -> bool {
        let sent = self.0.commands.push(QueueCommand::GiveBack).is_ok();
        self.0.has_commands.store(true, Ordering::Release);
        sent
    }

    /// Has the worker run a function on its queues at its next poll, unless other commands wait.
    pub fn run(&self, function: fn(&mut Q)) {
        if self.0.commands.is_empty() && self.0.commands.push(QueueCommand::Run(function)).is_ok() {
            self.0.has_commands.store(true, Ordering::Release);
        }
    }

    /// Queues that the worker gave back.
    pub fn returned(&self) -> Option<Q> {
        self.0.returned.pop()
    }
}

impl<Q> QueueReceiver<Q> {
    /// A receiver that keeps these queues.
    #[must_use]
    pub fn fixed(queues: Q) -> Self {
        let (_, receiver) = channel();
        Self { queues: Some(queues), ..receiver }
    }

    /// The queues, if the port's device is present.
    #[inline]
    pub fn queues(&mut self) -> Option<&mut Q> {
        if self.shared.has_commands.load(Ordering::Relaxed) {
            self.follow_commands();
        }
        self.queues.as_mut()
    }

    /// The queues as the last call of [`QueueReceiver::queues`] found them, for the rest of the same poll.
    #[inline]
    pub fn same_queues(&mut self) -> Option<&mut Q> {
        self.queues.as_mut()
    }

    #[cold]
    fn follow_commands(&mut self) {
        // Before the commands are read: the next call sees one that comes later.
        self.shared.has_commands.swap(false, Ordering::Acquire);
        while let Some(command) = self.shared.commands.pop() {
            let old = match command {
                QueueCommand::Take(queues) => self.queues.replace(queues),
                QueueCommand::GiveBack => self.queues.take(),
                QueueCommand::Run(function) => {
                    self.queues.as_mut().map(function);
                    None
                }
            };
            // There is room: no more queues come back than commands fit. Should there be none, the queues are dropped
            // here.
            drop(old.map(|queues| self.shared.returned.push(queues)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queues_come_and_go_whole_between_polls() {
        let (sender, mut worker) = channel::<u8>();
        assert_eq!(worker.queues(), None);
        sender.send(7).unwrap();
        assert_eq!(worker.same_queues(), None, "not within a poll");
        assert_eq!(worker.queues(), Some(&mut 7));
        for _ in 0..10 {
            sender.run(|queues| *queues += 1);
        }
        assert_eq!(worker.queues(), Some(&mut 8), "what waits already is not asked for again");
        sender.run(|queues| *queues -= 1);
        assert_eq!(worker.queues(), Some(&mut 7));
        assert!(sender.recall());
        assert_eq!(sender.returned(), None, "the worker has not polled yet");
        assert_eq!(worker.queues(), None);
        assert_eq!(sender.returned(), Some(7));
        assert!(sender.recall());
        assert_eq!((worker.queues(), sender.returned()), (None, None), "nothing to give back");
    }

    #[test]
    fn new_queues_send_the_old_ones_back() {
        let (sender, mut worker) = channel::<u8>();
        sender.send(1).unwrap();
        sender.send(2).unwrap();
        assert_eq!(worker.queues(), Some(&mut 2));
        assert_eq!(sender.returned(), Some(1));
    }

    #[test]
    fn commands_are_bounded_and_what_is_refused_comes_back() {
        let (sender, mut worker) = channel::<usize>();
        for n in 0..COMMANDS_MAX {
            sender.send(n).unwrap();
        }
        assert_eq!(sender.send(9), Err(9));
        assert!(!sender.recall());
        assert_eq!(worker.queues(), Some(&mut (COMMANDS_MAX - 1)));
        assert_eq!(std::iter::from_fn(|| sender.returned()).collect::<Vec<_>>(), [0, 1, 2]);
    }

    #[test]
    fn no_command_is_missed_by_a_worker_that_polls_meanwhile() {
        let (sender, mut worker) = channel::<u32>();
        let polling = std::thread::spawn(move || {
            let mut last = 0;
            while last < 10_000 {
                if let Some(&mut now) = worker.queues() {
                    assert!(now >= last);
                    last = now;
                } else {
                    std::thread::yield_now();
                }
            }
        });
        for n in 1..=10_000 {
            let mut queues = n;
            while let Err(refused) = sender.send(queues) {
                queues = refused;
                std::thread::yield_now();
            }
            while sender.returned().is_some() {}
        }
        polling.join().unwrap();
    }
}
