//! Clients and servers of the test's own in the namespaces of the network: sockets that were made there, so that a test holds
//! both ends of a connection and sees each byte.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::os::fd::AsFd;
use std::time::Duration;

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use super::{DEADLINE, Edge};

/// How long a client waits for an answer before it counts as none: four SYNs that are sent again take 15 s.
const PATIENCE: Duration = Duration::from_secs(20);

impl Edge {
    /// Calls `make` on a thread in the namespace; a socket made there stays there.
    pub fn inside<T: Send>(&self, namespace: &str, make: impl FnOnce() -> T + Send) -> T {
        let path = format!("/run/netns/{}", self.namespace(namespace));
        std::thread::scope(|scope| {
            let thread = scope.spawn(|| {
                let file = File::open(path).unwrap();
                move_into_link_name_space(file.as_fd(), Some(LinkNameSpaceType::Network)).unwrap();
                make()
            });
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }

    /// A server in the namespace of a backend that says its name, then returns every line. It ends with the test's process.
    pub fn echo_server(&self, namespace: &str, port: u16) {
        let listener = self.inside(namespace, || TcpListener::bind(("0.0.0.0", port)).unwrap());
        let name = namespace.to_owned();
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let name = name.clone();
                std::thread::spawn(move || echo(stream, &name));
            }
        });
    }

    /// Configured over af_packet, with an echo server at this port of every backend; not started.
    pub fn with_echo_servers(id: &str, port: u16) -> Self {
        let edge = Self::new(id);
        edge.configure("net_af_packet0,iface=uplink0", "net_af_packet1,iface=cluster0", "");
        for server in ["b11", "b12", "b13"] {
            edge.echo_server(server, port);
        }
        edge
    }

    /// A connection from the client; none when it is refused or nobody answers.
    pub fn connect(&self, address: &str) -> Option<Connection> {
        let address = address.parse().unwrap();
        let stream = self.inside("client", || TcpStream::connect_timeout(&address, PATIENCE)).ok()?;
        stream.set_read_timeout(Some(DEADLINE)).unwrap();
        let mut connection = Connection { stream: BufReader::new(stream), server: String::new() };
        connection.server = connection.read()?;
        Some(connection)
    }

    /// A server that returns every datagram with its name before it.
    pub fn udp_echo_server(&self, namespace: &str, port: u16) {
        let socket = self.inside(namespace, || UdpSocket::bind(("0.0.0.0", port)).unwrap());
        let name = namespace.to_owned();
        std::thread::spawn(move || {
            let mut buffer = [0; 2048];
            while let Ok((length, from)) = socket.recv_from(&mut buffer) {
                let answer = [name.as_bytes(), b" ", &buffer[..length]].concat();
                let _ = socket.send_to(&answer, from);
            }
        });
    }

    /// A UDP socket of the client that talks to one address, and hears only it.
    pub fn udp(&self, address: &str) -> UdpSocket {
        let socket = self.inside("client", || UdpSocket::bind("0.0.0.0:0").unwrap());
        socket.connect(address).unwrap();
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
        socket
    }
}

fn echo(mut stream: TcpStream, name: &str) {
    let _ = writeln!(stream, "{name}");
    let mut buffer = [0; 2048];
    while let Ok(length @ 1..) = stream.read(&mut buffer) {
        if stream.write_all(&buffer[..length]).is_err() {
            return;
        }
    }
}

/// A connection to an echo server.
pub struct Connection {
    stream: BufReader<TcpStream>,
    /// Who answered.
    pub server: String,
}

impl Connection {
    fn read(&mut self) -> Option<String> {
        let mut line = String::new();
        self.stream.read_line(&mut line).ok().filter(|length| *length > 0)?;
        Some(line.trim_end().to_owned())
    }

    /// Sends a line, which must come back.
    pub fn assert_alive(&mut self, line: &str) {
        writeln!(self.stream.get_ref(), "{line}").unwrap();
        assert_eq!(self.read().as_deref(), Some(line), "the connection to {} lives", self.server);
    }
}

/// What a datagram brings back, if anything.
pub fn ask(socket: &UdpSocket, question: &str) -> Option<String> {
    socket.send(question.as_bytes()).ok()?;
    let mut buffer = [0; 2048];
    let length = socket.recv(&mut buffer).ok()?;
    Some(String::from_utf8_lossy(&buffer[..length]).into_owned())
}
