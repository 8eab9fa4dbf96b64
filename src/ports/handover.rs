//! How a worker gets the queues of a port whose device comes while it polls, and gives them back when the device goes.
//!
//! Invariant: queues have one owner at any time, the worker or whoever attends the port, and pass between them whole. The
//! worker never waits and makes no system call for it: a poll reads one word that nobody writes while nothing changes.
//! Deliberately not here: what a device is and when it comes (`hardware`).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crossbeam_queue::ArrayQueue;
use dpdk_sys::{RxQueue, TxQueue};

/// Orders that may wait: one of each kind, and as many again.
const ORDERS_MAX: usize = 4;

/// One worker's queues of a port.
#[derive(Debug)]
pub struct Queues {
    /// Where packets arrive; none where the device has fewer queues than there are workers.
    pub rx: Option<RxQueue>,
    /// Where packets leave; likewise.
    pub tx: Option<TxQueue>,
}

/// What a worker is told about a port.
#[derive(Debug)]
enum Order<Q> {
    Take(Q),
    GiveBack,
    Use(fn(&mut Q)),
}

#[derive(Debug)]
struct Shared<Q> {
    orders: ArrayQueue<Order<Q>>,
    returned: ArrayQueue<Q>,
    waiting: AtomicBool,
}

/// The side of a port's attendant: one for each worker and port.
#[derive(Debug)]
pub struct Berth<Q = Queues>(Arc<Shared<Q>>);

/// The worker's side.
#[derive(Debug)]
pub struct Moored<Q = Queues> {
    queues: Option<Q>,
    shared: Arc<Shared<Q>>,
}

/// Both sides of a berth without queues.
#[must_use]
pub fn berth<Q>() -> (Berth<Q>, Moored<Q>) {
    let shared = Arc::new(Shared {
        orders: ArrayQueue::new(ORDERS_MAX),
        returned: ArrayQueue::new(ORDERS_MAX),
        waiting: AtomicBool::new(false),
    });
    (Berth(Arc::clone(&shared)), Moored { queues: None, shared })
}

impl<Q> Berth<Q> {
    /// Hands queues to the worker, which uses them from its next poll on. They come back when too many orders wait.
    ///
    /// # Errors
    /// The queues: the worker has not followed earlier orders.
    pub fn give(&self, queues: Q) -> Result<(), Q> {
        let given = self.0.orders.push(Order::Take(queues));
        self.0.waiting.store(true, Ordering::Release);
        given.or_else(|order| match order {
            Order::Take(queues) => Err(queues),
            Order::GiveBack | Order::Use(_) => Ok(()),
        })
    }

    /// Asks for the queues; [`Berth::returned`] has them after the worker's next poll. False: too many orders wait.
    #[must_use]
    pub fn call_back(&self) -> bool {
        let ordered = self.0.orders.push(Order::GiveBack).is_ok();
        self.0.waiting.store(true, Ordering::Release);
        ordered
    }

    /// Has the worker use its queues so once at its next poll, unless other orders wait.
    pub fn use_once(&self, how: fn(&mut Q)) {
        if self.0.orders.is_empty() && self.0.orders.push(Order::Use(how)).is_ok() {
            self.0.waiting.store(true, Ordering::Release);
        }
    }

    /// Queues that the worker gave back.
    pub fn returned(&self) -> Option<Q> {
        self.0.returned.pop()
    }
}

impl<Q> Moored<Q> {
    /// Queues that stay.
    #[must_use]
    pub fn fixed(queues: Q) -> Self {
        let (_, moored) = berth();
        Self { queues: Some(queues), ..moored }
    }

    /// The queues, if the port's device is there.
    #[inline]
    pub fn queues(&mut self) -> Option<&mut Q> {
        if self.shared.waiting.load(Ordering::Relaxed) {
            self.follow_orders();
        }
        self.queues.as_mut()
    }

    /// The queues as they were at the last look, for what belongs to the same poll.
    #[inline]
    pub fn same_queues(&mut self) -> Option<&mut Q> {
        self.queues.as_mut()
    }

    #[cold]
    fn follow_orders(&mut self) {
        // Before the orders are read: one that comes later is seen by the next look.
        self.shared.waiting.swap(false, Ordering::Acquire);
        while let Some(order) = self.shared.orders.pop() {
            let old = match order {
                Order::Take(queues) => self.queues.replace(queues),
                Order::GiveBack => self.queues.take(),
                Order::Use(how) => {
                    self.queues.as_mut().map(how);
                    None
                }
            };
            // There is room: no more come back than orders fit. Should there be none, the queues are dropped here.
            drop(old.map(|queues| self.shared.returned.push(queues)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queues_come_and_go_whole_between_polls() {
        let (attendant, mut worker) = berth::<u8>();
        assert_eq!(worker.queues(), None);
        attendant.give(7).unwrap();
        assert_eq!(worker.same_queues(), None, "not within a poll");
        assert_eq!(worker.queues(), Some(&mut 7));
        for _ in 0..10 {
            attendant.use_once(|queues| *queues += 1);
        }
        assert_eq!(worker.queues(), Some(&mut 8), "what waits already is not asked for again");
        attendant.use_once(|queues| *queues -= 1);
        assert_eq!(worker.queues(), Some(&mut 7));
        assert!(attendant.call_back());
        assert_eq!(attendant.returned(), None, "the worker has not polled yet");
        assert_eq!(worker.queues(), None);
        assert_eq!(attendant.returned(), Some(7));
        assert!(attendant.call_back());
        assert_eq!((worker.queues(), attendant.returned()), (None, None), "nothing to give back");
    }

    #[test]
    fn new_queues_send_the_old_ones_back() {
        let (attendant, mut worker) = berth::<u8>();
        attendant.give(1).unwrap();
        attendant.give(2).unwrap();
        assert_eq!(worker.queues(), Some(&mut 2));
        assert_eq!(attendant.returned(), Some(1));
    }

    #[test]
    fn orders_are_bounded_and_what_is_refused_comes_back() {
        let (attendant, mut worker) = berth::<usize>();
        for n in 0..ORDERS_MAX {
            attendant.give(n).unwrap();
        }
        assert_eq!(attendant.give(9), Err(9));
        assert!(!attendant.call_back());
        assert_eq!(worker.queues(), Some(&mut (ORDERS_MAX - 1)));
        assert_eq!(std::iter::from_fn(|| attendant.returned()).collect::<Vec<_>>(), [0, 1, 2]);
    }

    #[test]
    fn no_order_is_missed_by_a_worker_that_polls_meanwhile() {
        let (attendant, mut worker) = berth::<u32>();
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
            while let Err(refused) = attendant.give(queues) {
                queues = refused;
                std::thread::yield_now();
            }
            while attendant.returned().is_some() {}
        }
        polling.join().unwrap();
    }
}
