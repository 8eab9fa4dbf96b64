//! Programs that must not outlive this process.
//!
//! Not here: how long they run otherwise.

use std::io;
use std::os::unix::process::CommandExt as _;
use std::process::Command;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Mutex, PoisonError};
use std::thread;

/// The start of a program.
type Start = Box<dyn FnOnce() + Send>;

/// The thread that starts programs, once there is one.
static STARTER: Mutex<Option<Sender<Start>>> = Mutex::new(None);

/// Starts a program by `spawn`, and lets the kernel kill it when this process ends, whatever ends it (prctl(2),
/// `PR_SET_PDEATHSIG`).
///
/// The kernel kills the program when the *thread* that started it ends, and threads of an async runtime end while the
/// process goes on. So one thread, which lasts as long as the process, starts them all; `spawn` runs there.
///
/// # Errors
/// If the thread or the program cannot be started.
pub fn start_bound<T: Send + 'static>(
    mut command: Command,
    spawn: impl FnOnce(Command) -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    die_with_parent(&mut command);
    let (sender, started) = channel();
    let start = Box::new(move || drop(sender.send(spawn(command))));
    let mut starter = STARTER.lock().unwrap_or_else(PoisonError::into_inner);
    let jobs = match starter.take() {
        Some(jobs) => jobs,
        None => new_starter()?,
    };
    jobs.send(start).map_err(|_ended| io::Error::other("the thread that starts programs has ended"))?;
    *starter = Some(jobs);
    drop(starter);
    started.recv().map_err(io::Error::other)?
}

fn new_starter() -> io::Result<Sender<Start>> {
    let (sender, starts) = channel::<Start>();
    thread::Builder::new().name("starter".into()).spawn(move || starts.iter().for_each(|start| start()))?;
    Ok(sender)
}

fn die_with_parent(command: &mut Command) {
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
    use std::fs;
    use std::time::Duration;

    use super::*;

    fn sleep() -> Command {
        let mut command = Command::new("sleep");
        command.arg("600");
        command
    }

    #[test]
    fn a_program_outlives_the_thread_that_asked_for_it() {
        let ask = || {
            // SAFETY: gettid takes no argument and cannot fail.
            let thread = unsafe { libc::gettid() };
            (thread, start_bound(sleep(), |mut command| command.spawn()).unwrap())
        };
        let (thread, mut child) = thread::spawn(ask).join().unwrap();
        // The kernel sends the signal before a thread leaves this directory.
        while fs::exists(format!("/proc/self/task/{thread}")).unwrap() {
            thread::yield_now();
        }
        thread::sleep(Duration::from_millis(200));
        assert_eq!(child.try_wait().unwrap(), None);
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn the_kernel_kills_a_program_with_the_thread_that_started_it() {
        let start = || {
            let mut command = sleep();
            die_with_parent(&mut command);
            command.spawn().unwrap()
        };
        let mut child = thread::spawn(start).join().unwrap();
        assert!(!child.wait().unwrap().success());
    }

    #[test]
    fn a_program_that_is_missing_is_an_error() {
        let started = start_bound(Command::new("/nonexistent"), |mut command| command.spawn());
        assert_eq!(started.unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
