//! An allocator that gives large tables huge pages.
//!
//! Flow tables are aligned to cache lines and hold millions of entries. The system's allocator would clear such memory by
//! hand, page after page, and a walk over it would miss the TLB at every packet (measured among 1 M flows: 15 ns of it).
//! From the kernel it comes cleared, and is not there before it is touched.
//!
//! Invariant: what is freed is judged by the same layout as when it was made, so that both go the same way. Not here: what
//! is small or not aligned to cache lines; that is the system allocator's.

use std::alloc::{GlobalAlloc, Layout, System};
use std::ptr::null_mut;

/// Size of a transparent huge page, bytes, on x86-64 and on arm64 with 4 KB pages.
const HUGE_PAGE_BYTES: usize = 2 * 1024 * 1024;
/// From two huge pages on, rounding up to whole ones costs at most half as much again, and only address space.
const TABLE_BYTES_MIN: usize = 2 * HUGE_PAGE_BYTES;
/// Alignment that tells a table: a cache line's.
const TABLE_ALIGN_MIN: usize = 64;

/// The allocator of a process that forwards: install it with `#[global_allocator]`.
#[derive(Clone, Copy, Debug, Default)]
pub struct TablesInHugePages;

fn is_table(layout: Layout) -> bool {
    layout.size() >= TABLE_BYTES_MIN && (TABLE_ALIGN_MIN..=HUGE_PAGE_BYTES).contains(&layout.align())
}

/// Bytes that are mapped for a table; none if that is more than there are addresses.
fn mapped_bytes(layout: Layout) -> Option<usize> {
    layout.size().checked_next_multiple_of(HUGE_PAGE_BYTES)
}

/// Cleared memory that begins at a huge page; null when there is none.
fn map(layout: Layout) -> *mut u8 {
    let Some(bytes) = mapped_bytes(layout) else { return null_mut() };
    let Some(with_slack) = bytes.checked_add(HUGE_PAGE_BYTES) else { return null_mut() };
    let (access, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE);
    // SAFETY: a new mapping, at an address that the kernel chooses, touches no other memory.
    let start = unsafe { libc::mmap(null_mut(), with_slack, access, kind, -1, 0) };
    if start == libc::MAP_FAILED {
        return null_mut();
    }
    let start = start.cast::<u8>();
    let before = start.align_offset(HUGE_PAGE_BYTES);
    let after = HUGE_PAGE_BYTES - before;
    // SAFETY: the parts before and after the table are whole pages of the mapping just made, and nobody knows of them. Advice
    // changes no contents; a kernel without huge pages refuses it, and the table is only slower.
    unsafe {
        let table = start.add(before);
        if before > 0 {
            libc::munmap(start.cast(), before);
        }
        if after > 0 {
            libc::munmap(table.add(bytes).cast(), after);
        }
        libc::madvise(table.cast(), bytes, libc::MADV_HUGEPAGE);
        table
    }
}

// SAFETY: memory is `System`'s, or a mapping of its own that is at least as large and as aligned as the layout asks and stays
// until it is freed. `is_table` depends on nothing but the layout, so each goes back where it came from. Nothing here panics.
unsafe impl GlobalAlloc for TablesInHugePages {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if is_table(layout) {
            return map(layout);
        }
        // SAFETY: as our caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if is_table(layout) {
            return map(layout);
        }
        // SAFETY: as our caller promises.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        if is_table(layout) {
            // SAFETY: `map` made it, this long, and our caller does not use it any more.
            unsafe { libc::munmap(memory.cast(), mapped_bytes(layout).unwrap_or(0)) };
            return;
        }
        // SAFETY: as our caller promises.
        unsafe { System.dealloc(memory, layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: our caller promises that the new size, with this alignment, is a layout.
        let new_layout = unsafe { Layout::from_size_align_unchecked(size, layout.align()) };
        if !is_table(layout) && !is_table(new_layout) {
            // SAFETY: as our caller promises.
            return unsafe { System.realloc(memory, layout, size) };
        }
        // SAFETY: the new memory is another than the old, and both hold at least the bytes that are copied; the old one is
        // freed only once they are.
        unsafe {
            let new = self.alloc(new_layout);
            if !new.is_null() {
                memory.copy_to_nonoverlapping(new, layout.size().min(size));
                self.dealloc(memory, layout);
            }
            new
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout(size: usize, align: usize) -> Layout {
        Layout::from_size_align(size, align).unwrap()
    }

    #[test]
    fn large_and_aligned_is_a_table_and_nothing_else() {
        assert!(is_table(layout(TABLE_BYTES_MIN, 64)));
        assert!(!is_table(layout(TABLE_BYTES_MIN - 1, 64)));
        assert!(!is_table(layout(TABLE_BYTES_MIN, 32)));
        assert!(!is_table(layout(TABLE_BYTES_MIN, 2 * HUGE_PAGE_BYTES)));
    }

    #[test]
    fn a_table_is_cleared_holds_what_is_written_and_grows_and_shrinks_with_it() {
        let sizes = [TABLE_BYTES_MIN + 64, 3 * TABLE_BYTES_MIN, 4096, TABLE_BYTES_MIN];
        // SAFETY: each layout is the one the memory has at that moment, and what is read was written before.
        unsafe {
            let mut of = layout(sizes[0], 64);
            let mut memory = TablesInHugePages.alloc_zeroed(of);
            assert!(!memory.is_null() && memory.align_offset(HUGE_PAGE_BYTES) == 0);
            assert!((0..of.size()).step_by(4093).all(|at| memory.add(at).read() == 0));
            (0..4096).for_each(|at| memory.add(at).write(at.to_le_bytes()[0]));
            for size in sizes {
                memory = TablesInHugePages.realloc(memory, of, size);
                of = layout(size, 64);
                assert!(!memory.is_null() && memory.align_offset(64) == 0);
                assert!((0..4096).all(|at| memory.add(at).read() == at.to_le_bytes()[0]));
                memory.add(size - 1).write(7);
                memory.add(4095).write(255);
            }
            TablesInHugePages.dealloc(memory, of);
        }
    }

    #[test]
    fn what_no_machine_has_is_refused() {
        // SAFETY: the layout is a legal one; nothing is read.
        assert!(unsafe { TablesInHugePages.alloc_zeroed(layout(isize::MAX as usize / 4096 * 4096, 64)) }.is_null());
    }
}
