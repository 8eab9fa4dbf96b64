//! The generated bindings. Private to this package: other packages use the safe layer.
#![allow(non_camel_case_types, non_upper_case_globals, missing_docs, unreachable_pub, clippy::undocumented_unsafe_blocks)]

use std::ffi::{CStr, CString};

/// Rust uses DPDK's structs only through pointers, so their fields may move between releases.
macro_rules! opaque {
    ($($name:ident)*) => {$(
        #[repr(C)]
        pub struct $name {
            _private: [u8; 0],
        }
    )*};
}
opaque!(rte_device rte_mbuf rte_mempool rte_ring);

include!(concat!(env!("OUT_DIR"), "/bindings.rs"));

/// DPDK's text for an error number, including its own numbers beyond errno.
pub fn error_text(errno: i32) -> String {
    // SAFETY: returns a string literal or a buffer of this thread, terminated and valid until the thread's next call.
    unsafe { CStr::from_ptr(rte_strerror(errno.abs())) }.to_string_lossy().into_owned()
}

/// The error number of the last DPDK call of this thread.
pub fn errno() -> i32 {
    // SAFETY: reads a thread-local integer.
    unsafe { sluice_errno() }
}

/// A C string. It ends at the first NUL, as C would read it.
pub fn c_string(text: &str) -> CString {
    let end = text.find('\0').unwrap_or(text.len());
    CString::new(&text[..end]).unwrap_or_default()
}
