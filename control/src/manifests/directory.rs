//! The objects in all files of one directory.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Read as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use k8s_openapi::api::core::v1::{Node, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use proto::ServiceName;

use crate::world::change::Change;
use objects::ReadService;
use objects::crd::AddressPool;
use objects::documents::{Document, Object, documents};

/// Maximum size of a manifest, in bytes: 65,536 Services at 1 KB.
const FILE_BYTES_MAX: u64 = 64 * 1024 * 1024;

/// The files `*.yaml` and `*.yml` directly in a directory, with the last valid content of each.
#[derive(Debug)]
pub struct Directory {
    path: PathBuf,
    files: BTreeMap<PathBuf, File>,
    /// What the files were before they were read last.
    stamps: BTreeMap<PathBuf, Option<Stamp>>,
    reported: BTreeSet<String>,
}

/// What changes when a file does, also behind a symbolic link: device, inode, size, and the times of its content and of
/// its inode, s and ns.
type Stamp = (u64, u64, u64, (i64, i64), (i64, i64));

#[derive(Debug, Default)]
struct File {
    text: String,
    documents: Vec<Document>,
    error: Option<String>,
    was_read: bool,
}

/// All objects of a directory.
#[derive(Clone, Debug, Default)]
pub struct Objects {
    /// By namespace and name.
    pub services: BTreeMap<ServiceName, Service>,
    /// By namespace and name.
    pub slices: BTreeMap<ServiceName, EndpointSlice>,
    /// By name.
    pub nodes: BTreeMap<String, Node>,
    /// By name.
    pub pools: BTreeMap<String, AddressPool>,
    /// Paths of the unknown fields of Services.
    pub unknown_fields: BTreeMap<ServiceName, Vec<String>>,
}

impl Objects {
    /// The changes that make these all objects of a world. Manifests have no Namespace and no `EdgeGateway` objects:
    /// namespaces are known by the names in Services.
    #[must_use]
    pub fn into_changes(self) -> [Change; 6] {
        let read = |(name, service): (ServiceName, Service)| {
            let mut read = ReadService::from(service);
            self.unknown_fields.get(&name).into_iter().for_each(|fields| read.note_unknown_fields(fields));
            read
        };
        [
            Change::ServicesReplaced(self.services.into_iter().map(read).collect()),
            Change::SlicesReplaced(self.slices.into_values().map(Into::into).collect()),
            Change::NamespacesReplaced(Vec::new()),
            Change::GatewaysReplaced(BTreeMap::new()),
            Change::PoolsReplaced(self.pools.into_values().collect()),
            Change::NodesReplaced(self.nodes.into_values().collect()),
        ]
    }
}

impl Directory {
    /// A directory that has not been read yet.
    #[must_use]
    pub const fn new(path: PathBuf) -> Self {
        Self { path, files: BTreeMap::new(), stamps: BTreeMap::new(), reported: BTreeSet::new() }
    }

    /// Its path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether any file differs from what was read last, judged by inode, size and times. inotify tells only about the
    /// directory itself, not about the targets of symbolic links.
    #[must_use]
    pub fn has_changed(&self) -> bool {
        self.list().is_ok_and(|paths| stamps(&paths) != self.stamps)
    }

    /// Reads changed files. Returns the objects if any file changed, and new messages.
    ///
    /// # Errors
    /// If the directory cannot be listed; then nothing changes.
    pub fn read(&mut self) -> io::Result<(Option<Objects>, Vec<String>)> {
        let mut is_new = self.files.is_empty() && self.reported.is_empty();
        let paths = self.list()?;
        self.stamps = stamps(&paths);
        let before = self.files.len();
        self.files.retain(|path, _| paths.contains(path));
        is_new |= self.files.len() != before;
        for path in paths {
            let text = read_text(&path);
            let file = self.files.entry(path).or_default();
            is_new |= file.take(text);
        }
        let mut notes = Vec::new();
        let objects = self.merge(&mut notes);
        let new = notes.iter().filter(|note| !self.reported.contains(*note)).cloned().collect();
        self.reported = notes.into_iter().collect();
        Ok((is_new.then_some(objects), new))
    }

    /// Whether every file was read successfully once. Before that the set of Services is unknown.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        self.files.values().all(|file| file.was_read)
    }

    /// Of each file that could not be read last, its path and why.
    fn errors(&self) -> impl Iterator<Item = String> {
        self.files.iter().filter_map(|(path, file)| Some(format!("{}: {}", path.display(), file.error.as_ref()?)))
    }

    fn list(&self) -> io::Result<BTreeSet<PathBuf>> {
        let mut paths = BTreeSet::new();
        for entry in std::fs::read_dir(&self.path)? {
            let path = entry?.path();
            let is_yaml = path.extension().is_some_and(|extension| extension == "yaml" || extension == "yml");
            let is_hidden = path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"."));
            if is_yaml && !is_hidden && may_be_file(&path) {
                paths.insert(path);
            }
        }
        Ok(paths)
    }

    /// If two files define the same object, the first by file name wins.
    fn merge(&self, notes: &mut Vec<String>) -> Objects {
        let mut objects = Objects::default();
        let mut owners: BTreeMap<(&'static str, ServiceName), String> = BTreeMap::new();
        notes.extend(self.errors());
        for (path, file) in &self.files {
            let place = path.display();
            for document in &file.documents {
                let part = document.place();
                notes.extend(document.notes.iter().map(|note| format!("{place}: {part}: {note}")));
                let Some((name, object)) = &document.object else { continue };
                let kind = match object {
                    Object::Service(_) => "Service",
                    Object::Slice(_) => "EndpointSlice",
                    Object::Node(_) => "Node",
                    Object::Pool(_) => "AddressPool",
                };
                if let Some(owner) = owners.get(&(kind, name.clone())) {
                    notes.push(format!("{place}: {part}: {kind} {name} is not used, because {owner} has one of that name"));
                    continue;
                }
                owners.insert((kind, name.clone()), format!("{place} ({part})"));
                match object {
                    Object::Service(service) => {
                        objects.services.insert(name.clone(), (**service).clone());
                        if !document.unknown.is_empty() {
                            objects.unknown_fields.insert(name.clone(), document.unknown.clone());
                        }
                    }
                    Object::Slice(slice) => drop(objects.slices.insert(name.clone(), (**slice).clone())),
                    Object::Node(node) => drop(objects.nodes.insert(name.name.clone(), (**node).clone())),
                    Object::Pool(pool) => drop(objects.pools.insert(name.name.clone(), (**pool).clone())),
                }
            }
        }
        objects
    }
}

/// Whether there is a file, as far as is known: one that cannot be looked at has not been removed, nor has a link whose
/// target is missing. Reading it says why.
fn may_be_file(path: &Path) -> bool {
    std::fs::metadata(path)
        .map_or_else(|error| error.kind() != io::ErrorKind::NotFound || path.is_symlink(), |found| found.is_file())
}

impl File {
    /// Applies new content; returns whether the objects changed.
    fn take(&mut self, text: Result<String, String>) -> bool {
        let text = match text {
            Ok(text) => text,
            Err(error) => {
                self.error = Some(self.with_consequence(&error));
                return false;
            }
        };
        if self.error.is_none() && text == self.text {
            return false;
        }
        match documents(&text) {
            Ok(documents) => {
                let is_new = documents != self.documents;
                *self = Self { text, documents, error: None, was_read: true };
                is_new
            }
            Err(error) => {
                self.error = Some(self.with_consequence(&error.to_string()));
                false
            }
        }
    }

    fn with_consequence(&self, error: &str) -> String {
        let consequence =
            if self.was_read { "its last good content stays in force" } else { "nothing of the file is used until it is mended" };
        format!("{error}; {consequence}")
    }
}

fn stamps(paths: &BTreeSet<PathBuf>) -> BTreeMap<PathBuf, Option<Stamp>> {
    let stamp = |path: &PathBuf| {
        let of = std::fs::metadata(path).ok()?;
        Some((of.dev(), of.ino(), of.size(), (of.mtime(), of.mtime_nsec()), (of.ctime(), of.ctime_nsec())))
    };
    paths.iter().map(|path| (path.clone(), stamp(path))).collect()
}

fn read_text(path: &Path) -> Result<String, String> {
    let mut text = String::new();
    let file = std::fs::File::open(path).map_err(|error| format!("cannot be read: {error}"))?;
    let read = file.take(FILE_BYTES_MAX + 1).read_to_string(&mut text).map_err(|error| format!("cannot be read: {error}"))?;
    if read as u64 > FILE_BYTES_MAX {
        return Err(format!("is larger than {FILE_BYTES_MAX} bytes; split it"));
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn service(name: &str, port: u16) -> String {
        format!(
            "apiVersion: v1\nkind: Service\nmetadata: {{name: {name}}}\nspec: {{type: LoadBalancer, ports: [{{port: {port}}}]}}\n"
        )
    }

    fn ports(objects: &Objects) -> Vec<(String, i32)> {
        let port = |service: &Service| service.spec.as_ref().unwrap().ports.as_ref().unwrap()[0].port;
        objects.services.iter().map(|(name, service)| (name.name.clone(), port(service))).collect()
    }

    #[test]
    fn only_yaml_directly_in_the_directory_is_read() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("a.yaml"), service("a", 80)).unwrap();
        fs::write(dir.path().join("b.yml"), service("b", 81)).unwrap();
        fs::write(dir.path().join("c.txt"), service("c", 82)).unwrap();
        fs::write(dir.path().join(".d.yaml"), service("d", 82)).unwrap();
        fs::create_dir(dir.path().join("sub.yaml")).unwrap();
        fs::write(dir.path().join("sub.yaml").join("e.yaml"), service("e", 83)).unwrap();
        let (objects, notes) = Directory::new(dir.path().to_owned()).read().unwrap();
        assert_eq!(ports(&objects.unwrap()), [("a".to_owned(), 80), ("b".to_owned(), 81)]);
        assert!(notes.is_empty());
    }

    #[test]
    fn a_file_that_stops_parsing_keeps_its_last_valid_content_with_one_message() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("a.yaml");
        let mut directory = Directory::new(dir.path().to_owned());
        fs::write(&file, service("a", 80)).unwrap();
        directory.read().unwrap();
        fs::write(&file, "kind: [").unwrap();
        fs::write(dir.path().join("b.yaml"), service("b", 81)).unwrap();
        let (objects, notes) = directory.read().unwrap();
        assert_eq!(ports(&objects.unwrap()), [("a".to_owned(), 80), ("b".to_owned(), 81)]);
        assert!(notes[0].contains("a.yaml") && notes[0].contains("line 1") && notes[0].contains("last good"), "{notes:?}");
        let (objects, notes) = directory.read().unwrap();
        assert!(objects.is_none() && notes.is_empty());
        fs::write(&file, service("a", 90)).unwrap();
        assert_eq!(ports(&directory.read().unwrap().0.unwrap())[0], ("a".to_owned(), 90));
    }

    #[test]
    fn a_new_file_that_does_not_parse_is_not_said_to_have_good_content() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("a.yaml");
        let mut directory = Directory::new(dir.path().to_owned());
        fs::write(&file, service("a", 80) + "kind: Service\n").unwrap();
        let (objects, notes) = directory.read().unwrap();
        assert!(objects.is_none_or(|objects| objects.services.is_empty()));
        let [note] = notes.as_slice() else { panic!("{notes:?}") };
        assert!(note.contains("line 5") && note.contains("found key \"kind\" a second time"), "{note}");
        assert!(note.ends_with("nothing of the file is used until it is mended"), "{note}");
        fs::write(&file, service("a", 80)).unwrap();
        assert_eq!(ports(&directory.read().unwrap().0.unwrap()), [("a".to_owned(), 80)]);
        fs::write(&file, "kind: [").unwrap();
        assert!(directory.read().unwrap().1[0].ends_with("its last good content stays in force"));
    }

    #[test]
    fn a_link_whose_target_changes_has_changed_and_one_whose_target_is_missing_keeps_its_content() {
        let (dir, elsewhere) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let target = elsewhere.path().join("web.yaml");
        fs::write(&target, service("web", 80)).unwrap();
        std::os::unix::fs::symlink(&target, dir.path().join("web.yaml")).unwrap();
        let mut directory = Directory::new(dir.path().to_owned());
        assert!(directory.has_changed());
        directory.read().unwrap();
        assert!(!directory.has_changed());
        fs::write(&target, service("web", 8080)).unwrap();
        assert!(directory.has_changed());
        assert_eq!(ports(&directory.read().unwrap().0.unwrap()), [("web".to_owned(), 8080)]);
        fs::write(elsewhere.path().join("new"), service("web", 8181)).unwrap();
        fs::rename(elsewhere.path().join("new"), &target).unwrap();
        assert!(directory.has_changed(), "of the same size, by another inode");
        directory.read().unwrap();
        fs::remove_file(&target).unwrap();
        assert!(directory.has_changed());
        let (objects, notes) = directory.read().unwrap();
        assert!(objects.is_none() && notes[0].ends_with("its last good content stays in force"), "{notes:?}");
        fs::remove_file(dir.path().join("web.yaml")).unwrap();
        assert!(directory.read().unwrap().0.unwrap().services.is_empty());
    }

    #[test]
    fn a_file_that_cannot_be_looked_at_is_not_a_removed_one() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("a.yaml");
        let mut directory = Directory::new(dir.path().to_owned());
        fs::write(&file, service("a", 80)).unwrap();
        directory.read().unwrap();
        // A link to itself: every look at it is an error, though not that there is no such file.
        fs::remove_file(&file).unwrap();
        std::os::unix::fs::symlink(&file, &file).unwrap();
        let (objects, notes) = directory.read().unwrap();
        assert!(objects.is_none() && notes[0].contains("cannot be read"), "{notes:?}");
        fs::remove_file(&file).unwrap();
        assert!(ports(&directory.read().unwrap().0.unwrap()).is_empty());
    }

    #[test]
    fn of_two_files_with_one_object_the_first_by_name_wins_and_the_other_is_named() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("b.yaml"), service("web", 81)).unwrap();
        fs::write(dir.path().join("a.yaml"), service("web", 80)).unwrap();
        let (objects, notes) = Directory::new(dir.path().to_owned()).read().unwrap();
        assert_eq!(ports(&objects.unwrap()), [("web".to_owned(), 80)]);
        assert!(notes[0].contains("b.yaml") && notes[0].contains("a.yaml"), "{notes:?}");
    }

    #[test]
    fn a_misspelt_restriction_in_a_file_refuses_its_service() {
        let dir = tempfile::tempdir().unwrap();
        let refusal = |text: &str| {
            fs::write(dir.path().join("a.yaml"), text).unwrap();
            let (objects, notes) = Directory::new(dir.path().to_owned()).read().unwrap();
            let [Change::ServicesReplaced(services), ..] = objects.unwrap().into_changes() else { panic!("not first") };
            let wanted = services[0].candidate.as_ref().unwrap().wanted.clone();
            (wanted.err().map(|error| error.to_string()), notes)
        };
        let text = service("web", 80);
        assert_eq!(refusal(&text), (None, Vec::new()));
        let (why, notes) = refusal(&text.replace("ports:", "loadBalancerSourceRange: [192.0.2.0/24], ports:"));
        assert!(why.unwrap().contains("did you mean `loadBalancerSourceRanges`?") && notes.len() == 1, "{notes:?}");
        let (why, notes) = refusal(&text.replace("LoadBalancer", "Loadbalancer"));
        assert!(why.unwrap().contains("spec.type is \"Loadbalancer\"") && notes.is_empty(), "{notes:?}");
    }

    #[test]
    fn a_deleted_file_removes_its_objects_and_a_deleted_directory_removes_none() {
        let dir = tempfile::tempdir().unwrap();
        let inner = dir.path().join("manifests");
        fs::create_dir(&inner).unwrap();
        fs::write(inner.join("a.yaml"), service("a", 80)).unwrap();
        fs::write(inner.join("b.yaml"), service("b", 80)).unwrap();
        let mut directory = Directory::new(inner.clone());
        directory.read().unwrap();
        fs::remove_file(inner.join("a.yaml")).unwrap();
        assert_eq!(directory.read().unwrap().0.unwrap().services.len(), 1);
        fs::rename(&inner, dir.path().join("away")).unwrap();
        assert!(directory.read().is_err());
        fs::rename(dir.path().join("away"), &inner).unwrap();
        assert!(directory.read().unwrap().0.is_none());
    }
}
