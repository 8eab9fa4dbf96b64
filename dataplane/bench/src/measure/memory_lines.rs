//! What the memory of the machine allows: the time to fetch one random cache line of a large table.
//!
//! A packet of one of a million flows needs a line of the index and one of the flow, a reply often a third. However well
//! they are fetched ahead, that takes at least this time for each: the processor keeps few requests under way. It is longer
//! in a virtual machine whose host has small pages, as each line then needs a walk through two page tables.
//!
//! Not here: the engine.

use std::hint::black_box;
use std::time::Instant;

use dataplane::prefetch;
use zerocopy::FromZeros;

use super::super::error::BenchError;
use super::super::report::LineTimes;
use super::super::trace::Random;

/// Bytes of the table: a million flows of IPv4 take 48 MB in the index and in what packets read of them.
const TABLE_BYTES: usize = 64 << 20;
/// Lines that are read. About 20 ms where a line takes 10 ns.
const READ: u32 = 2_000_000;
/// How many lines ahead each is fetched: further than any loop of the engine.
const AHEAD: u32 = 32;

#[derive(FromZeros)]
#[repr(C, align(64))]
struct RandomLine([u64; 8]);

/// A random position below `len`, without a division, which would take as long as a line.
#[inline(always)]
#[allow(clippy::cast_possible_truncation)] // below `len`
fn position(random: &mut Random, len: usize) -> usize {
    ((u128::from(random.next()) * len as u128) >> 64) as usize
}

/// Measures it on a core.
pub(super) fn measure_lines(core: usize) -> Result<LineTimes, BenchError> {
    let on_core = move || {
        let is_pinned = core_affinity::set_for_current(core_affinity::CoreId { id: core });
        if is_pinned { measure_here() } else { Err(BenchError::Core(core)) }
    };
    std::thread::spawn(on_core).join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

fn measure_here() -> Result<LineTimes, BenchError> {
    let count = TABLE_BYTES / size_of::<RandomLine>();
    let mut lines = RandomLine::new_vec_zeroed(count).map_err(|_| BenchError::Table(TABLE_BYTES))?;
    lines.iter_mut().for_each(|line| line.0[0] = 1); // so that each has a page of its own
    Ok(LineTimes { fetched_ahead_ns: fetched_ahead(&lines), dependent_ns: dependent(&lines) })
}

fn fetched_ahead(lines: &[RandomLine]) -> f64 {
    let (mut fetched, mut read, mut sum) = (Random(1), Random(1), 0_u64);
    let begin = Instant::now();
    for n in 0..READ + AHEAD {
        lines.get(position(&mut fetched, lines.len())).inspect(|line| prefetch(*line));
        if n >= AHEAD {
            sum = sum.wrapping_add(lines.get(position(&mut read, lines.len())).map_or(0, |line| line.0[0]));
        }
    }
    black_box(sum);
    begin.elapsed().as_secs_f64() * 1e9 / f64::from(READ)
}

fn dependent(lines: &[RandomLine]) -> f64 {
    let read = READ / 16;
    let mut random = Random(1);
    let begin = Instant::now();
    for _ in 0..read {
        let line = lines.get(position(&mut random, lines.len()));
        random.0 = random.0.wrapping_add(line.map_or(0, |line| line.0[0]));
    }
    black_box(random.0);
    begin.elapsed().as_secs_f64() * 1e9 / f64::from(read)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_spread_over_the_whole_table() {
        let (mut random, mut seen) = (Random(1), [0_u32; 16]);
        for _ in 0..16_000 {
            seen[position(&mut random, 16)] += 1;
        }
        assert!(seen.iter().all(|count| (800..1200).contains(count)), "{seen:?}");
    }
}
