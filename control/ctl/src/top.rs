//! `sluicectl top`: services, backends, flows, workers, drops, ports, gateways and the heaviest flows live on a terminal.
//!
//! Invariants: every figure comes from the admin API. The terminal is restored however this ends.

mod columns;
mod draw;
mod figures;
mod keys;
mod model;
mod number;
mod rate;
mod sample;

use std::io::{self, IsTerminal};
use std::pin::Pin;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crossterm::event::{Event, EventStream};
use proto::v1::admin_client::AdminClient;
use ratatui::DefaultTerminal;
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::MissedTickBehavior;
use tokio_stream::StreamExt as _;
use tonic::transport::Channel;

use crate::args::TopArguments;
use crate::client::{ClientError, Server};
use crate::error::CtlError;
use draw::{Look, draw};
use model::{Action, Model};
use sample::{Sample, Wanted, fetch};

/// The connection, until a request fails.
type Client = Option<AdminClient<Channel>>;
/// A request on its way.
type Pending<'a> = Pin<Box<dyn Future<Output = (Client, Result<Sample, ClientError>)> + 'a>>;

/// Shows the live view until it is ended.
///
/// # Errors
/// If the output is no terminal, the first request fails, or the terminal does.
pub(super) async fn run(server: &Server, arguments: &TopArguments) -> Result<(), CtlError> {
    let has_terminal = io::stdout().is_terminal() && std::env::var("TERM").is_ok_and(|term| !term.is_empty() && term != "dumb");
    if !has_terminal {
        return Err(CtlError::NoTerminal);
    }
    let start = Instant::now();
    let (client, first) = ask(server, start, None, Wanted::default()).await;
    let mut model = Model::new(first?);
    // An empty value counts as unset (https://no-color.org).
    let has_colours = std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
    let look = Look { has_colours, delay: arguments.delay.0 };
    let mut terminal = ratatui::try_init()?;
    let ended =
        show(&mut terminal, &mut model, look, async |client, wanted| ask(server, start, client, wanted).await, client).await;
    ratatui::try_restore()?;
    ended
}

/// One round of questions.
async fn ask(server: &Server, start: Instant, mut client: Client, wanted: Wanted) -> (Client, Result<Sample, ClientError>) {
    let sample = fetch(server, &mut client, wanted).await;
    (client, sample.map(|sample| Sample { at: start.elapsed(), ..sample }))
}

/// Draws, and waits for keys, samples and signals.
async fn show(
    terminal: &mut DefaultTerminal,
    model: &mut Model,
    look: Look,
    ask: impl AsyncFn(Client, Wanted) -> (Client, Result<Sample, ClientError>),
    client: Client,
) -> Result<(), CtlError> {
    let (mut events, mut terminate, mut hang_up) =
        (EventStream::new(), signal(SignalKind::terminate())?, signal(SignalKind::hangup())?);
    let mut ticks = tokio::time::interval_at(tokio::time::Instant::now() + look.delay, look.delay);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut client = Some(client);
    let mut pending: Option<Pending> = None;
    loop {
        model.resize(terminal.size()?.height);
        terminal.draw(|frame| draw(frame, model, look, since_1970()))?;
        let mut is_due = false;
        tokio::select! {
            event = events.next() => match event {
                Some(Ok(Event::Key(key))) => match model.press(key) {
                    Action::Quit => return Ok(()),
                    Action::Refresh => is_due = true,
                    Action::Nothing => {}
                },
                Some(Ok(_)) => {}
                Some(Err(error)) => return Err(error.into()),
                None => return Ok(()),
            },
            _ = ticks.tick() => is_due = true,
            (returned, answer) = async { match pending.as_mut() { Some(pending) => pending.await, None => std::future::pending().await } } => {
                (pending, client) = (None, Some(returned));
                model.answered(answer.map_err(|error| error.to_string()), since_1970().as_secs());
                // The view may have changed meanwhile.
                is_due = model.lacks_rows();
            }
            _ = terminate.recv() => return Ok(()),
            _ = hang_up.recv() => return Ok(()),
        }
        if is_due && let Some(client) = client.take() {
            pending = Some(Box::pin(ask(client, model.wanted())));
        }
    }
}

fn since_1970() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

#[cfg(test)]
mod tests;
