//! Real ports in place of those without a device, and a generator in this program that sends to them.

use std::fs::File;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use wirepath::cli::{self, Failure};
use wirepath_apps::pktgen::flows::{Replay, Traffic};
use wirepath_apps::pktgen::ports::{PortName, Role};
use wirepath_apps::pktgen::rate::Rate;
use wirepath_apps::pktgen::{Generator, Limit, Trial};
use wirepath_pmd::drivers::PortSettings;
use wirepath_pmd::drivers::r#virtual::null::Frames;
use wirepath_pmd::drivers::r#virtual::pcap::{Format, MAX_FRAME, Precision, Writer};

/// Ports of this machine to measure with.
#[derive(clap::Args, Clone, Debug, Default)]
pub(crate) struct RealPorts {
    /// Two ports of this machine in place of ports without a device, named as for `wirepath pktgen`. The cycles in
    /// which the workers found no packet are reported too
    #[arg(long, value_name = "A,B", value_delimiter = ',', conflicts_with = "buffers")]
    through: Vec<PortName>,

    /// Ports of a generator in this program, which are cabled to those of --through. Without it, others send
    #[arg(long, value_name = "C,D", value_delimiter = ',', requires = "through", conflicts_with = "packets")]
    generator: Vec<PortName>,

    /// Core of the generator
    #[arg(long, value_name = "N", requires = "generator")]
    generator_core: Option<usize>,

    /// Only write the frames for the two ports to PREFIX-a.pcap and PREFIX-b.pcap, for `wirepath pktgen --pcap` on
    /// another machine
    #[arg(long, value_name = "PREFIX", requires = "through", conflicts_with = "generator")]
    capture: Option<PathBuf>,
}

/// Frames that are offered to each of the two ports.
pub(crate) type Offered = [Option<Frames>; 2];

/// A generator that runs.
pub(crate) struct Running {
    threads: Vec<JoinHandle<Result<(), Failure>>>,
    stop: Arc<AtomicBool>,
}

impl RealPorts {
    /// Returns the two ports with these names and queues; `None`: the measurement is without devices.
    pub(crate) fn settings(&self, names: [&str; 2], queues: u16) -> Result<Option<[PortSettings; 2]>, Failure> {
        if self.through.is_empty() {
            return Ok(None);
        }
        let role = Role { sends: true, receives: true };
        let [a, b] = pair("--through", &self.through)?.map(|port| (port.clone(), role));
        let ports = PortName::settings(&[a, b], Vec::new())?;
        let ports = ports.into_iter().zip(names).map(|((port, _), name)| PortSettings {
            queues,
            name: name.to_owned(),
            ..port
        });
        Ok(ports.collect::<Vec<_>>().try_into().ok())
    }

    /// Returns whether frames are needed, for a generator or a capture.
    pub(crate) fn needs_frames(&self) -> bool {
        !self.generator.is_empty() || self.only_captures()
    }

    /// Returns whether the frames are only written.
    pub(crate) fn only_captures(&self) -> bool {
        self.capture.is_some()
    }

    /// Writes the frames for the ports, and prints how to send them.
    pub(crate) fn write(&self, offered: &Offered) -> Result<(), Failure> {
        let Some(prefix) = &self.capture else { return Ok(()) };
        let mut text = String::new();
        for ((frames, name), port) in offered.iter().zip(["a", "b"]).zip(&self.through) {
            let Some(Frames::Templates(templates)) = frames else { continue };
            let mut path = prefix.clone().into_os_string();
            path.push(format!("-{name}.pcap"));
            let path = PathBuf::from(path);
            let refuse = |error: std::io::Error| Failure::failed(format!("{}: {error}", path.display()));
            let file = File::create(&path).map_err(|error| Failure::usage(format!("{}: {error}", path.display())))?;
            let mut writer =
                Writer::new(file, Format::Pcap, Precision::Nano, MAX_FRAME as u32, name).map_err(refuse)?;
            for frame in templates.frames() {
                writer.write(0, std::iter::once(frame), frame.len()).map_err(refuse)?;
            }
            writer.flush().map_err(refuse)?;
            let path = path.display();
            text += &format!("for {port}: wirepath pktgen --tx PORT --pcap {path} --rate max --seconds 60\n");
        }
        cli::print(text)
    }

    /// Starts the generator, if there is one. The ports to measure have been started.
    pub(crate) fn start(&self, offered: Offered) -> Result<Option<Running>, Failure> {
        if self.generator.is_empty() {
            return Ok(None);
        }
        let ports = pair("--generator", &self.generator)?;
        let sends = offered.each_ref().map(Option::is_some);
        let role = |index: usize| Role { sends: sends[index], receives: true };
        let stop = Arc::new(AtomicBool::new(false));
        let mut running = Running { threads: Vec::new(), stop };
        for (index, frames) in offered.into_iter().enumerate() {
            let Some(Frames::Templates(templates)) = frames else { continue };
            let mut own = vec![(ports[index].clone(), role(index))];
            // One generator has one kind of frames. It takes the other port too, if that one only receives.
            if !sends[1 - index] {
                own.push((ports[1 - index].clone(), role(1 - index)));
            }
            let trial = Trial {
                traffic: Traffic::Replay(Arc::new(Replay::from_frames(templates.frames()).map_err(Failure::usage)?)),
                rate: Some(Rate::Max),
                limit: Limit::None,
                drain: Duration::ZERO,
                reorder_threshold: None,
            };
            let own = PortName::settings(&own, Vec::new())?;
            // Each generator has a thread, and an own core behind that of the one before.
            let cores = self.generator_core.map(|first| first + running.threads.len());
            let mut generator = Generator::open(own, 1, cores.into_iter().collect())?;
            generator.check(&trial)?;
            let stop = Arc::clone(&running.stop);
            let thread = std::thread::Builder::new().name("generator".to_owned()).spawn(move || {
                let result = generator.run(&trial, &stop, |_| ())?;
                generator.close()?;
                result.failure.map_or(Ok(()), |why| Err(Failure::failed(format!("generator: {why}"))))
            });
            running.threads.push(thread.map_err(Failure::failed)?);
        }
        Ok(Some(running))
    }
}

impl Running {
    /// Stops the generator.
    ///
    /// # Errors
    /// If one of its ports has failed.
    pub(crate) fn stop(mut self) -> Result<(), Failure> {
        self.join()
    }

    fn join(&mut self) -> Result<(), Failure> {
        self.stop.store(true, Ordering::Relaxed);
        let results: Vec<_> = self.threads.drain(..).map(JoinHandle::join).collect();
        results
            .into_iter()
            .try_for_each(|result| result.unwrap_or_else(|_| Err(Failure::failed("a generator panicked"))))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // After `stop` nothing is left. On the way of an error, that error is reported.
        let _ = self.join();
    }
}

fn pair<'p>(option: &str, ports: &'p [PortName]) -> Result<[&'p PortName; 2], Failure> {
    match ports {
        [a, b] => Ok([a, b]),
        _ => Err(Failure::usage(format!("{option}: expected two ports, such as af_xdp:eth0,af_xdp:eth1"))),
    }
}
