//! A list once, or again and again.

use std::io::Write;

use super::rows::Row;
use super::{ClientError, CtlError, ListArguments, Output, Screen, Server, client, print};

/// Prints the list, and with `--watch` what becomes of it until the output closes or the gateway goes.
pub(super) async fn follow<R: Row>(
    server: &Server,
    arguments: &ListArguments,
    out: &mut impl Write,
    notes: &mut impl Write,
    screen: Screen,
) -> Result<(), CtlError> {
    let mut client = client::connect(server).await?;
    let path = server.socket();
    let rows = R::list(&mut client).await.map_err(|status| ClientError::from_status(path, &status, false))?;
    if !arguments.watch {
        return print::list(&rows, arguments.output, out, notes);
    }
    let mut period = tokio::time::interval(screen.period);
    let mut shown: Vec<R> = Vec::new();
    let mut first = true;
    let mut rows = Some(rows);
    loop {
        period.tick().await;
        let now = match rows.take() {
            Some(rows) => rows,
            None => R::list(&mut client).await.map_err(|status| ClientError::from_status(path, &status, true))?,
        };
        match arguments.output {
            Output::Table if first || now != shown => {
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
        (shown, first) = (now, false);
    }
}

/// The objects of `now` that are new or differ from what was shown.
fn changed<'a, R: Row>(shown: &[R], now: &'a [R]) -> impl Iterator<Item = &'a R> {
    now.iter().filter(|row| shown.iter().find(|old| old.same_object(row)).is_none_or(|old| old != *row))
}
