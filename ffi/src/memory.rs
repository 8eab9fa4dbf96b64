//! Advice to the kernel about large tables.

use std::io;
use std::mem::size_of_val;

/// Size of a transparent huge page, bytes, on x86-64 and on arm64 with 4 KB pages.
const HUGE_PAGE_BYTES: usize = 2 * 1024 * 1024;

/// Asks the kernel to keep `memory` in huge pages where it can (`MADV_HUGEPAGE`): a table of 1 M flows is then walked without
/// a TLB miss per packet. Only whole huge pages within it are concerned; contents do not change. Best before first use.
///
/// # Errors
/// The kernel has no transparent huge pages.
pub fn advise_huge<T>(memory: &mut [T]) -> io::Result<()> {
    let bytes = size_of_val(memory);
    let start = memory.as_mut_ptr().cast::<u8>();
    let skipped = start.align_offset(HUGE_PAGE_BYTES);
    let whole = bytes.saturating_sub(skipped) / HUGE_PAGE_BYTES * HUGE_PAGE_BYTES;
    if whole == 0 {
        return Ok(());
    }
    // SAFETY: the range lies within `memory`, which we may write, and the advice does not change what is in it.
    let failed = unsafe { libc::madvise(start.add(skipped).cast(), whole, libc::MADV_HUGEPAGE) } != 0;
    if failed { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn advice_leaves_the_contents_alone() {
        let mut table = vec![7_u64; 5 * HUGE_PAGE_BYTES / 8];
        match advise_huge(&mut table) {
            Ok(()) => {}
            Err(error) => assert_eq!(error.raw_os_error(), Some(libc::EINVAL), "only a kernel without huge pages may refuse"),
        }
        assert!(table.iter().all(|&entry| entry == 7));
    }

    #[test]
    fn less_than_a_huge_page_is_left_as_it_is() {
        assert!(advise_huge(&mut [0_u8; 100]).is_ok());
        assert!(advise_huge::<u64>(&mut []).is_ok());
    }
}
