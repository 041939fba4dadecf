use std::hash::{DefaultHasher, Hasher};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use wirepath_testlab::{Namespace, print_uncaptured};

use crate::world::{Variant, World, host_address, remote_address};

const GIBIBYTE: u64 = 1 << 30;
/// Time without progress after which a stream counts as broken.
const STALLED: Duration = Duration::from_secs(30);

/// Sends a gibibyte of TCP from the host to the remote and a sixteenth of it back. The checksums of both ends
/// must be equal.
pub(crate) fn a_gibibyte_unharmed(variant: Variant) {
    unharmed(variant, GIBIBYTE);
}

/// Sends an eighth of a gibibyte.
pub(crate) fn some_unharmed(variant: Variant) {
    unharmed(variant, GIBIBYTE / 8);
}

fn unharmed(variant: Variant, bytes: u64) {
    let world = World::new(variant, 1, 1, 1500);
    let mut gateway = world.start();
    let (host, remote) = (&world.hosts[0], &world.remotes[0]);
    world.wait_for(&mut gateway, host, &remote_address(0));
    for (from, to, address, bytes) in
        [(host, remote, remote_address(0), bytes), (remote, host, host_address(0), bytes / 16)]
    {
        let start = Instant::now();
        let (sent, received) = transfer(from, to, &address, bytes);
        assert_eq!(sent, received, "bytes and checksum, sent and received");
        assert_eq!(sent.0, bytes);
        print_uncaptured(&format!(
            "{}: {} MiB of TCP to {address} in {:.1} s, checksum {:016x} at both ends",
            variant.name,
            bytes >> 20,
            start.elapsed().as_secs_f64(),
            received.1
        ));
    }
    let summary = gateway.stop();
    assert!(summary.number("rx_bytes") > bytes, "{}", summary.json);
}

/// Sends this number of bytes over TCP. Returns bytes and checksum of both ends.
pub(crate) fn transfer(from: &Namespace, to: &Namespace, address: &str, bytes: u64) -> ((u64, u64), (u64, u64)) {
    let listener = to.inside(|| TcpListener::bind((address, 5001)).expect("listen"));
    std::thread::scope(|scope| {
        let receiver = scope.spawn(|| {
            let (stream, _) = listener.accept().expect("a connection");
            receive(stream)
        });
        let sent = from.inside(|| send(TcpStream::connect((address, 5001)).expect("connect"), bytes));
        (sent, receiver.join().expect("the receiver"))
    })
}

fn send(mut stream: TcpStream, bytes: u64) -> (u64, u64) {
    stream.set_write_timeout(Some(STALLED)).expect("a timeout");
    let mut hasher = DefaultHasher::new();
    let mut block = vec![0u8; 256 << 10];
    let (mut random, mut sent) = (fastrand::Rng::with_seed(1), 0);
    while sent < bytes {
        // Every block differs, so that lost, duplicated or misplaced blocks are detected.
        random.fill(&mut block);
        let part = &block[..block.len().min((bytes - sent) as usize)];
        hasher.write(part);
        stream.write_all(part).expect("the stream goes on");
        sent += part.len() as u64;
    }
    (sent, hasher.finish())
}

fn receive(mut stream: TcpStream) -> (u64, u64) {
    stream.set_read_timeout(Some(STALLED)).expect("a timeout");
    let mut hasher = DefaultHasher::new();
    let (mut block, mut received) = (vec![0u8; 256 << 10], 0);
    loop {
        match stream.read(&mut block).expect("the stream goes on") {
            0 => return (received, hasher.finish()),
            n => {
                hasher.write(&block[..n]);
                received += n as u64;
            }
        }
    }
}
