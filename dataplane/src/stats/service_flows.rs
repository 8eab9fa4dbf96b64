//! The flows of each Service on one worker, by which the worker shares its flow table among Services.
//!
//! A Service has a number. The count of flows of a backend and frontend carries the number of the Service that it
//! belongs to, so that the end of a flow finds the Service in the word that it changes anyway.
//!
//! **Invariant:** the flows of a number are the sum over the counts that carry it. When a count passes to another
//! Service, which happens when a slot is used again, its flows pass with it.
//!
//! Not here: how much a Service may have (`flow::shares`), and which number it has (`compiler`).

use std::alloc::{Layout, handle_alloc_error};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use zerocopy::FromZeros;

/// Numbers of Services: as many as a gateway may have (`proto::limits::SERVICES_MAX`).
const NUMBERS: usize = 1 << 16;
const _: () = assert!(NUMBERS == proto::limits::SERVICES_MAX);

/// The number of a Service on this gateway. 0 stands for flows whose Service is not known yet: those of the process
/// before and of partners, until a new flow of the same backend begins.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct ServiceNumber(pub u16);

/// The present flows of a backend and a frontend on one worker, which is the only writer.
#[derive(Debug, Default, FromZeros)]
#[repr(transparent)]
pub struct FlowCount(
    /// The number of the Service in the upper 16 bits, the count below, modulo 2^48.
    AtomicU64,
);

const COUNT_BITS: u32 = 48;
const COUNT_MASK: u64 = (1 << COUNT_BITS) - 1;

impl FlowCount {
    /// The number of flows; a negative number stands for 2^64 and less.
    #[must_use]
    pub fn get(&self) -> u64 {
        let word = self.0.load(Ordering::Relaxed) << (u64::BITS - COUNT_BITS);
        (word.cast_signed() >> (u64::BITS - COUNT_BITS)).cast_unsigned()
    }

    /// Adds flows whose Service does not matter.
    pub fn add(&self, n: u64) {
        self.set(self.get().wrapping_add(n));
    }

    /// Replaces the number of flows.
    pub fn set(&self, n: u64) {
        let word = self.0.load(Ordering::Relaxed);
        self.0.store(word & !COUNT_MASK | n & COUNT_MASK, Ordering::Relaxed);
    }

    /// Makes the memory of the count exist without changing it.
    pub(super) fn touch(&self) {
        let _ = self.0.compare_exchange(0, 0, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// The Service that the flows belong to.
    pub(super) fn service(&self) -> ServiceNumber {
        number_of(self.0.load(Ordering::Relaxed))
    }
}

#[allow(clippy::cast_possible_truncation)] // 16 bits
const fn number_of(word: u64) -> ServiceNumber {
    ServiceNumber((word >> COUNT_BITS) as u16)
}

/// The flows of each Service.
#[derive(Debug)]
pub(super) struct ServiceFlows(Box<[AtomicU32; NUMBERS]>);

impl Default for ServiceFlows {
    fn default() -> Self {
        let zeroed = <[AtomicU32]>::new_box_zeroed_with_elems(NUMBERS);
        let flows = zeroed.unwrap_or_else(|_| handle_alloc_error(Layout::new::<[AtomicU32; NUMBERS]>()));
        // There are as many as asked for.
        Self(flows.try_into().unwrap_or_else(|_| unreachable!()))
    }
}

impl ServiceFlows {
    #[inline(always)]
    fn add(&self, number: ServiceNumber, n: u32) {
        let flows = &self.0[usize::from(number.0)];
        flows.store(flows.load(Ordering::Relaxed).wrapping_add(n), Ordering::Relaxed);
    }

    /// The flows of a Service.
    #[inline(always)]
    pub(super) fn get(&self, number: ServiceNumber) -> u32 {
        let flows = self.0[usize::from(number.0)].load(Ordering::Relaxed);
        if flows > u32::MAX / 2 { 0 } else { flows }
    }

    /// Counts a flow of this Service that begins.
    #[inline(always)]
    pub(super) fn began(&self, count: &FlowCount, service: ServiceNumber) {
        let mut word = count.0.load(Ordering::Relaxed);
        if number_of(word) != service {
            word = self.pass(word, service);
        }
        count.0.store(word & !COUNT_MASK | word.wrapping_add(1) & COUNT_MASK, Ordering::Relaxed);
        self.add(service, 1);
    }

    /// Lets the flows of a count belong to this Service from now on.
    #[cold]
    #[allow(clippy::cast_possible_truncation)] // modulo 2^32, as the flows of a Service are counted
    fn pass(&self, word: u64, service: ServiceNumber) -> u64 {
        let flows = word as u32;
        self.add(number_of(word), flows.wrapping_neg());
        self.add(service, flows);
        word & COUNT_MASK | u64::from(service.0) << COUNT_BITS
    }

    /// Counts a flow that began elsewhere, for the Service that its count belongs to now.
    pub(super) fn joined(&self, count: &FlowCount) {
        self.began(count, count.service());
    }

    /// Counts the end of a flow.
    #[inline(always)]
    pub(super) fn ended(&self, count: &FlowCount) {
        let word = count.0.load(Ordering::Relaxed);
        count.0.store(word & !COUNT_MASK | word.wrapping_sub(1) & COUNT_MASK, Ordering::Relaxed);
        self.add(number_of(word), u32::MAX);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn the_flows_of_a_service_are_those_of_its_counts(steps in proptest::collection::vec((0usize..4, 0u16..3, 0u8..4), 1..300)) {
            let (counts, flows) = ([(); 4].map(|()| FlowCount::default()), ServiceFlows::default());
            let mut owners: HashMap<usize, (u16, u32)> = HashMap::new();
            for (slot, service, kind) in steps {
                let owner = owners.entry(slot).or_default();
                match kind {
                    0 if owner.1 > 0 => {
                        flows.ended(&counts[slot]);
                        owner.1 -= 1;
                    }
                    1 => {
                        flows.joined(&counts[slot]);
                        owner.1 += 1;
                    }
                    _ => {
                        flows.began(&counts[slot], ServiceNumber(service));
                        *owner = (service, owner.1 + 1);
                    }
                }
                for (slot, (service, held)) in &owners {
                    prop_assert_eq!((counts[*slot].get(), counts[*slot].service()), (u64::from(*held), ServiceNumber(*service)));
                }
                for service in 0..3 {
                    let held: u32 = owners.values().filter(|owner| owner.0 == service).map(|owner| owner.1).sum();
                    prop_assert_eq!(flows.get(ServiceNumber(service)), held);
                }
            }
        }
    }

    #[test]
    fn a_count_below_0_stays_one_and_keeps_its_service() {
        let (count, flows) = (FlowCount::default(), ServiceFlows::default());
        flows.began(&count, ServiceNumber(7));
        flows.ended(&count);
        flows.ended(&count);
        assert_eq!((count.get(), count.service(), flows.get(ServiceNumber(7))), (u64::MAX, ServiceNumber(7), 0));
        count.add(3);
        assert_eq!((count.get(), count.service()), (2, ServiceNumber(7)));
    }
}
