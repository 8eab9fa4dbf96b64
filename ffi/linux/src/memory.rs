//! An allocator that puts large tables into huge pages.
//!
//! Flow tables hold millions of entries. The system's allocator would clear such memory
//! page by page, and a random access would miss the TLB for every packet (measured among 1 M flows: 15 ns). Memory
//! mapped from the kernel is already cleared, and is allocated when it is first touched.
//!
//! Invariant: allocation and deallocation decide by the same layout, so both use the same allocator. Not here:
//! allocations that are small or of single bytes, which the system's allocator serves.

use std::alloc::{GlobalAlloc, Layout, System};
use std::ptr::null_mut;

/// Size of a transparent huge page, bytes, on x86-64 and on arm64 with 4 KB pages.
const HUGE_PAGE_BYTES: usize = 2 * 1024 * 1024;
/// Smallest table: from two huge pages on, rounding up to whole ones adds at most half, and only address space.
const TABLE_BYTES_MIN: usize = 2 * HUGE_PAGE_BYTES;
/// Alignment by which a table is recognised: that of a word. Text and packets' bytes have less.
const TABLE_ALIGN_MIN: usize = 4;

/// The allocator of a forwarding process; install it with `#[global_allocator]`.
#[derive(Clone, Copy, Debug, Default)]
pub struct TablesInHugePages;

fn is_table(layout: Layout) -> bool {
    layout.size() >= TABLE_BYTES_MIN && (TABLE_ALIGN_MIN..=HUGE_PAGE_BYTES).contains(&layout.align())
}

/// Bytes to map for a table; none if they exceed the address space.
fn mapped_bytes(layout: Layout) -> Option<usize> {
    layout.size().checked_next_multiple_of(HUGE_PAGE_BYTES)
}

/// Cleared memory aligned to a huge page; null if there is none.
fn map(layout: Layout) -> *mut u8 {
    let Some(bytes) = mapped_bytes(layout) else { return null_mut() };
    let Some(with_slack) = bytes.checked_add(HUGE_PAGE_BYTES) else { return null_mut() };
    let (access, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE);
    // SAFETY: a new mapping at an address that the kernel chooses touches no other memory.
    let start = unsafe { libc::mmap(null_mut(), with_slack, access, kind, -1, 0) };
    if start == libc::MAP_FAILED {
        return null_mut();
    }
    let start = start.cast::<u8>();
    let before = start.align_offset(HUGE_PAGE_BYTES);
    let after = HUGE_PAGE_BYTES - before;
    // SAFETY: the parts before and after the table are whole pages of the new mapping, and nothing refers to them. The
    // advice changes no contents; a kernel without huge pages refuses it, and the table is only slower.
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

// SAFETY: memory comes from `System`, or from a mapping that satisfies the layout's size and alignment and stays until
// it is freed. `is_table` depends on the layout only, so memory is freed by the allocator that made it. Nothing here
// panics.
unsafe impl GlobalAlloc for TablesInHugePages {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if is_table(layout) {
            return map(layout);
        }
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if is_table(layout) {
            return map(layout);
        }
        // SAFETY: as the caller promises.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        if is_table(layout) {
            // SAFETY: `map` made it with this length, and the caller no longer uses it.
            unsafe { libc::munmap(memory.cast(), mapped_bytes(layout).unwrap_or(0)) };
            return;
        }
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(memory, layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: the caller promises that the new size and this alignment are a valid layout.
        let new_layout = unsafe { Layout::from_size_align_unchecked(size, layout.align()) };
        if !is_table(layout) && !is_table(new_layout) {
            // SAFETY: as the caller promises.
            return unsafe { System.realloc(memory, layout, size) };
        }
        // SAFETY: the new and the old memory do not overlap, and both hold at least the copied bytes; the old one is
        // freed after the copy.
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
    fn many_words_are_a_table_and_nothing_else() {
        assert!(is_table(layout(TABLE_BYTES_MIN, 64)));
        assert!(is_table(layout(TABLE_BYTES_MIN, 4)));
        assert!(!is_table(layout(TABLE_BYTES_MIN - 1, 64)));
        assert!(!is_table(layout(TABLE_BYTES_MIN, 1)));
        assert!(!is_table(layout(TABLE_BYTES_MIN, 2 * HUGE_PAGE_BYTES)));
    }

    #[test]
    fn a_table_is_cleared_holds_what_is_written_and_grows_and_shrinks_with_it() {
        let sizes = [TABLE_BYTES_MIN + 64, 3 * TABLE_BYTES_MIN, 4096, TABLE_BYTES_MIN];
        // SAFETY: each layout is that of the memory at the moment, and the bytes read were written before.
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
    fn a_size_beyond_any_machine_is_refused() {
        // SAFETY: the layout is valid; nothing is read.
        assert!(unsafe { TablesInHugePages.alloc_zeroed(layout(isize::MAX as usize / 4096 * 4096, 64)) }.is_null());
    }
}
