//! Tests of the status page: which answers, with which headers, of which size.
