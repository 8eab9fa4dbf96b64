//! The client's side of iperf3's protocol, for downloads that are watched one by one: a control connection, JSON in both
//! directions, then streams that begin with the cookie of the control connection.
//!
//! A server ends all streams when one breaks.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use super::{Connection, answer, broken};

/// Sent by each connection first: 36 characters and a zero.
const COOKIE: &[u8; 37] = b"sluicefleetsluicefleetsluicefleetslu\0";
/// States that the server announces.
const PARAM_EXCHANGE: u8 = 9;
const CREATE_STREAMS: u8 = 10;
const TEST_START: u8 = 1;
const TEST_RUNNING: u8 = 2;
/// Bytes that the server writes at a time, and bits a second for each stream: two writes and a half a second.
const BLOCK: usize = 1000;
const BITS_PER_S: usize = 20_000;
const BLOCK_EVERY: Duration = Duration::from_millis(400);

/// Holds one download for each of the connections.
pub(super) async fn downloads(connections: Vec<Connection>, address: SocketAddr) {
    let Some(stalled) = connections.first().map(|connection| connection.shared.stalled) else { return };
    let (control, streams) = match answer(stalled, open(connections.len(), address)).await {
        Ok(opened) => opened,
        Err(error) => {
            let why = format!("iperf3 does not start: {error}");
            return connections.into_iter().for_each(|connection| connection.end(Err(why.clone())));
        }
    };
    let tasks: Vec<_> = connections.into_iter().zip(streams).map(|(c, stream)| tokio::spawn(download(c, stream))).collect();
    for task in tasks {
        let _ = task.await;
    }
    drop(control);
}

/// The control connection and the streams of a test that has begun.
async fn open(streams: usize, address: SocketAddr) -> io::Result<(TcpStream, Vec<TcpStream>)> {
    let mut control = TcpStream::connect(address).await?;
    control.write_all(COOKIE).await?;
    expect(&mut control, PARAM_EXCHANGE).await?;
    let parameters = serde_json::json!({
        "tcp": true, "omit": 0, "time": 0, "num": 0, "blockcount": 0, "parallel": streams, "reverse": true,
        "len": BLOCK, "bandwidth": BITS_PER_S, "pacing_timer": 100_000, "client_version": "3.12",
    });
    let parameters = parameters.to_string();
    control.write_all(&u32::try_from(parameters.len()).unwrap().to_be_bytes()).await?;
    control.write_all(parameters.as_bytes()).await?;
    expect(&mut control, CREATE_STREAMS).await?;
    let mut open = Vec::new();
    for _ in 0..streams {
        let mut stream = TcpStream::connect(address).await?;
        stream.write_all(COOKIE).await?;
        open.push(stream);
    }
    expect(&mut control, TEST_START).await?;
    expect(&mut control, TEST_RUNNING).await?;
    Ok((control, open))
}

async fn expect(control: &mut TcpStream, state: u8) -> io::Result<()> {
    let found = control.read_u8().await?;
    if found == state { Ok(()) } else { Err(broken(&format!("state {} instead of {state}", found.cast_signed()))) }
}

/// Reads a stream until one read after the end of the load.
async fn download(mut connection: Connection, mut stream: TcpStream) {
    let mut buffer = [0; BLOCK];
    let mut last = Instant::now();
    let result = loop {
        let is_last = connection.shared.is_over();
        match answer(connection.shared.stalled, stream.read(&mut buffer)).await {
            Ok(0) => break Err("closed by the server".to_owned()),
            Err(error) => break Err(error.to_string()),
            Ok(_) => connection.answered("b11", last + BLOCK_EVERY),
        }
        last = Instant::now();
        if is_last {
            break Ok(());
        }
    };
    // The other streams end with the first one that is closed.
    let shared = Arc::clone(&connection.shared);
    let is_broken = result.is_err();
    connection.end(result);
    while !is_broken && shared.ended.load(Ordering::Relaxed) < shared.open.load(Ordering::Relaxed) {
        tokio::time::sleep(super::INTERVAL / 10).await;
    }
}
