//! Printing of a list, once or repeatedly.

use std::io::Write;

use proto::v1;

use crate::rows::{Listed, Row};
use crate::{ClientError, CtlError, ListArguments, Output, Screen, Server, client, print};

/// Prints the list; with `--watch` also its changes, until the output is closed or the gateway ends.
pub(super) async fn follow<R: Row>(
    server: &Server,
    arguments: &ListArguments,
    out: &mut impl Write,
    notes: &mut impl Write,
    screen: Screen,
) -> Result<(), CtlError> {
    let mut client = client::connect(server).await?;
    let path = server.socket();
    let first = R::list(&mut client).await.map_err(|status| ClientError::from_status(path, &status, false))?;
    if !arguments.watch {
        print::list(&first.rows, arguments.output, out, notes)?;
        return if first.silent.is_empty() { Ok(()) } else { Err(CtlError::Silent(told(&first.silent))) };
    }
    let mut period = tokio::time::interval(screen.period);
    let mut shown: Vec<R> = Vec::new();
    let mut silent = Vec::new();
    let mut is_first = true;
    let mut listed = Some(first);
    loop {
        period.tick().await;
        let Listed { rows: now, silent: silent_now } = match listed.take() {
            Some(listed) => listed,
            None => R::list(&mut client).await.map_err(|status| ClientError::from_status(path, &status, true))?,
        };
        if silent_now != silent && !silent_now.is_empty() {
            writeln!(notes, "{}", told(&silent_now))?;
        }
        match arguments.output {
            Output::Table if is_first || now != shown => {
                if screen.redraw {
                    print::clear(out)?;
                }
                print::list(&now, Output::Table, out, notes)?;
            }
            Output::Table => {}
            output => {
                for row in changed(&shown, &now) {
                    print::object(row, output, out)?;
                }
                out.flush()?;
            }
        }
        (shown, silent, is_first) = (now, silent_now, false);
    }
}

/// The gateways that did not answer, and why.
fn told(silent: &[v1::Silent]) -> String {
    let one = |v1::Silent { gateway, reason }: &v1::Silent| format!("nothing of gateway {gateway}: {reason}");
    silent.iter().map(one).collect::<Vec<_>>().join("\n")
}

/// The objects of `now` that are new or differ from the last output.
fn changed<'a, R: Row>(shown: &[R], now: &'a [R]) -> impl Iterator<Item = &'a R> {
    now.iter().filter(|row| shown.iter().find(|old| old.same_object(row)).is_none_or(|old| old != *row))
}
