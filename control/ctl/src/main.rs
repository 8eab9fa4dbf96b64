//! `sluicectl`, the command-line client of a gateway. Exit codes: 0 done, 1 failed, 2 bad usage.

use std::io::{self, ErrorKind, IsTerminal};
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use ctl::{Arguments, CtlError, Screen, run};

/// Polling interval of `--watch`, slow enough to read and no load for a gateway.
const PERIOD: Duration = Duration::from_secs(1);

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let screen = Screen { redraw: io::stdout().is_terminal(), period: PERIOD };
    match run(&arguments, &mut io::stdout(), &mut io::stderr(), screen).await {
        Ok(()) => ExitCode::SUCCESS,
        // The reader of the pipe closed it.
        Err(CtlError::Output(error)) if error.kind() == ErrorKind::BrokenPipe => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("sluicectl: {error}");
            ExitCode::from(error.exit_code())
        }
    }
}
