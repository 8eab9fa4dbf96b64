//! Programs that must not outlive this process.
//!
//! Not here: how long they run otherwise.

use std::io;
use std::os::unix::process::CommandExt as _;
use std::process::Command;

/// Lets the kernel kill the program when the thread that starts it ends, whatever ends it (prctl(2),
/// `PR_SET_PDEATHSIG`). To be started from a thread that lives as long as the process.
pub fn die_with_parent(command: &mut Command) {
    let parent = std::process::id().cast_signed();
    let ask = move || {
        // SAFETY: prctl with this option reads its second argument as a number and takes no pointer.
        if unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) } != 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: getppid takes no argument and cannot fail.
        if unsafe { libc::getppid() } == parent { Ok(()) } else { Err(io::ErrorKind::BrokenPipe.into()) }
    };
    // SAFETY: between fork and exec the closure only makes two system calls, which are async-signal-safe, and creates
    // errors without allocation.
    unsafe { command.pre_exec(ask) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_dies_with_the_thread_that_started_it() {
        let start = || {
            let mut command = Command::new("sleep");
            die_with_parent(command.arg("600"));
            command.spawn().unwrap()
        };
        let mut child = std::thread::spawn(start).join().unwrap();
        assert!(!child.wait().unwrap().success());
    }
}
