//! Clients and servers in the namespaces of the network. The test's process opens their sockets there, so that it holds
//! both ends of a connection and sees each byte.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::os::fd::AsFd;
use std::time::Duration;

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use super::{DEADLINE, Edge};

/// Timeout of a client: four retransmissions of a SYN take 15 s.
const CLIENT_TIMEOUT: Duration = Duration::from_secs(20);

/// Moves this thread into a namespace, by its full name.
pub fn enter_namespace(namespace: &str) {
    let file = File::open(format!("/run/netns/{namespace}")).unwrap();
    move_into_link_name_space(file.as_fd(), Some(LinkNameSpaceType::Network)).unwrap();
}

/// Calls `make` on a thread in a namespace, by its full name.
pub fn in_namespace<T: Send>(namespace: &str, make: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            enter_namespace(namespace);
            make()
        });
        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

impl Edge {
    /// Calls `make` on a thread in the namespace. A socket that it opens stays in the namespace.
    pub fn in_namespace<T: Send>(&self, namespace: &str, make: impl FnOnce() -> T + Send) -> T {
        in_namespace(&self.namespace(namespace), make)
    }

    /// Starts a server in the namespace of a backend. It sends its name, then returns every line, until the test's
    /// process ends.
    pub fn echo_server(&self, namespace: &str, port: u16) {
        self.echo_server_at(namespace, "0.0.0.0", port);
    }

    /// The same, on one address.
    pub fn echo_server_at(&self, namespace: &str, address: &str, port: u16) {
        let listener = self.in_namespace(namespace, || TcpListener::bind((address, port)).unwrap());
        let name = namespace.to_owned();
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let name = name.clone();
                std::thread::spawn(move || echo(stream, &name));
            }
        });
    }

    /// A gateway over af_packet with an echo server on this port of every backend; not started.
    pub fn with_echo_servers(test: &str, name: &str, port: u16) -> Option<Self> {
        let edge = Self::with_af_packet(test, name)?;
        for server in ["b11", "b12", "b13"] {
            edge.echo_server(server, port);
        }
        Some(edge)
    }

    /// A connection from the client; `None` if it is refused or times out.
    pub fn connect(&self, address: &str) -> Option<Connection> {
        let address = address.parse().unwrap();
        let stream = self.in_namespace("client", || TcpStream::connect_timeout(&address, CLIENT_TIMEOUT)).ok()?;
        // A server that answers with SYN cookies never learns of a connection whose ACK is lost, until the client sends.
        stream.set_read_timeout(Some(CLIENT_TIMEOUT)).unwrap();
        let mut connection = Connection { stream: BufReader::new(stream), server: String::new() };
        connection.server = connection.read()?;
        connection.stream.get_ref().set_read_timeout(Some(DEADLINE)).unwrap();
        Some(connection)
    }

    /// Starts a server that returns every datagram, prefixed with its name.
    pub fn udp_echo_server(&self, namespace: &str, port: u16) {
        let socket = self.in_namespace(namespace, || UdpSocket::bind(("0.0.0.0", port)).unwrap());
        let name = namespace.to_owned();
        std::thread::spawn(move || {
            let mut buffer = [0; 2048];
            while let Ok((length, from)) = socket.recv_from(&mut buffer) {
                let answer = [name.as_bytes(), b" ", &buffer[..length]].concat();
                let _ = socket.send_to(&answer, from);
            }
        });
    }

    /// A UDP socket of the client, connected to one address.
    pub fn udp(&self, address: &str) -> UdpSocket {
        let socket = self.in_namespace("client", || UdpSocket::bind("0.0.0.0:0").unwrap());
        socket.connect(address).unwrap();
        socket.set_read_timeout(Some(CLIENT_TIMEOUT)).unwrap();
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
    /// Name of the server.
    pub server: String,
}

impl Connection {
    fn read(&mut self) -> Option<String> {
        let mut line = String::new();
        self.stream.read_line(&mut line).ok().filter(|length| *length > 0)?;
        Some(line.trim_end().to_owned())
    }

    /// Its socket, after everything was read.
    pub fn into_socket(self) -> TcpStream {
        self.stream.into_inner()
    }

    /// Sends a line, and expects it back.
    pub fn assert_alive(&mut self, line: &str) {
        writeln!(self.stream.get_ref(), "{line}").unwrap();
        assert_eq!(self.read().as_deref(), Some(line), "the connection to {} works", self.server);
    }
}

/// The reply to a datagram, if one arrives.
pub fn request(socket: &UdpSocket, text: &str) -> Option<String> {
    socket.send(text.as_bytes()).ok()?;
    let mut buffer = [0; 2048];
    let length = socket.recv(&mut buffer).ok()?;
    Some(String::from_utf8_lossy(&buffer[..length]).into_owned())
}
