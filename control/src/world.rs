//! The world: all relevant objects as specs, kept current by the changes of one source.
//!
//! Invariant: the revision of a Service grows exactly when its specification or its slices change, so that a plan
//! builds only those again. Changed Services are found without examining the others. No I/O, no clock. Deliberately not
//! here: which class is ours and what follows from the objects (`plan`).

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;
use std::sync::Arc;

use k8s_openapi::api::core::v1::{Namespace, Node};
use proto::ServiceName;

use crate::world::change::{Change, KnownGateway};
use crate::world::checkpoint::Checkpoint;
use crate::world::drained_nodes::DrainedNodes;
use crate::world::overrides::Overrides;
use objects::crd::{AddressPool, AddressPoolSpec};
use objects::note::{Cause, Note, Remark, Subject};
use objects::{Candidate, NodeSpec, NotServable, ReadService, ReadSlice, ServiceObject, SliceError, SliceSpec};

pub mod change;
pub mod checkpoint;
pub mod drained_nodes;
pub mod overrides;
pub mod planned_drains;

/// A Service that may be ours, and when it last changed.
#[derive(Clone, Debug)]
pub struct ServiceEntry {
    /// The parsed object.
    pub candidate: Box<Candidate>,
    /// Revision of the world at its last change, slices included.
    pub revision: u64,
    /// Revision of the world at its last change of any kind, such as of its status.
    touched: u64,
}

/// Labels of an object.
pub type Labels = BTreeMap<String, String>;

/// Revisions of the world at the last change of each kind of object on which the assignment of addresses depends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Revisions {
    /// A Service was added, changed or removed; changes of slices do not count.
    pub services: u64,
    /// A relevant field of a node changed.
    pub nodes: u64,
    /// The labels of a namespace changed.
    pub namespaces: u64,
    /// The spec or the labels of an `AddressPool` changed; its status does not count.
    pub pools: u64,
    /// A gateway of any group was added, changed or removed.
    pub gateways: u64,
}

/// Label with the name of a namespace, which the API server sets.
const NAMESPACE_NAME_LABEL: &str = "kubernetes.io/metadata.name";

/// Maximum number of objects whose notes a replica keeps which does not lead; of each the newest note.
const NOTED_OBJECTS_MAX: usize = 1024;

/// The objects.
#[derive(Clone, Debug, Default)]
pub struct World {
    services: BTreeMap<ServiceName, ServiceEntry>,
    /// All Services by the revision of their last change.
    touched: BTreeMap<u64, ServiceName>,
    leftovers: BTreeMap<ServiceName, Arc<ServiceObject>>,
    slices: BTreeMap<ServiceName, SliceSpec>,
    slices_of: BTreeMap<ServiceName, BTreeSet<ServiceName>>,
    /// Slices that were deleted while their Service remains: a managed slice is created again a moment later.
    deleted_slices: BTreeSet<ServiceName>,
    nodes: BTreeMap<String, NodeSpec>,
    namespaces: BTreeMap<String, Labels>,
    /// Namespaces that are being deleted.
    ending_namespaces: BTreeSet<String>,
    pools: BTreeMap<String, AddressPool>,
    gateways: BTreeMap<String, KnownGateway>,
    checkpoint: Checkpoint,
    overrides: Overrides,
    overrides_revision: u64,
    drained_nodes: Arc<DrainedNodes>,
    /// Notes that were not fetched yet, by object: they end with it, and with what they are about.
    notes: BTreeMap<Subject, Vec<Note>>,
    /// Objects that are deleted, or being deleted, and were not fetched yet.
    deleted: BTreeSet<Subject>,
    /// Services whose owners got the note that they are never served.
    unserved: BTreeSet<ServiceName>,
    revision: u64,
    revisions: Revisions,
    /// Whether a slice changed since this was last asked.
    slices_changed: bool,
    services_known: bool,
    slices_known: bool,
    nodes_known: bool,
    namespaces_known: bool,
    pools_known: bool,
    gateways_known: bool,
    checkpoint_known: bool,
    overrides_known: bool,
}

impl World {
    /// Applies one change.
    pub fn apply(&mut self, change: Change) {
        match change {
            Change::ServicesReplaced(services) => self.replace_services(services),
            Change::SlicesReplaced(slices) => self.replace_slices(slices),
            Change::ServiceApplied(service) => drop(self.apply_service(*service, &BTreeSet::new())),
            Change::SliceApplied(slice) => drop(self.apply_slice(*slice)),
            Change::NodesReplaced(nodes) => self.replace_nodes(&nodes),
            Change::NodeApplied(node) => match NodeSpec::try_from(&*node) {
                Ok(spec) => self.put_node(spec),
                Err(error) => tracing::warn!(%error, "object ignored"),
            },
            Change::NodeDeleted(name) => self.remove_node(&name),
            Change::NamespacesReplaced(all) => self.replace_namespaces(&all),
            Change::NamespaceApplied(namespace) => self.put_namespace(&namespace),
            Change::NamespaceDeleted(name) => self.remove_namespace(&name),
            Change::PoolsReplaced(all) => self.replace_pools(all),
            Change::PoolApplied(pool) => self.put_pool(*pool),
            Change::PoolDeleted(name) => self.remove_pool(&name),
            Change::CheckpointReplaced(all) => (self.checkpoint, self.checkpoint_known) = (*all, true),
            Change::GatewaysReplaced(all) => {
                self.gateways_known = true;
                let before = std::mem::replace(&mut self.gateways, all);
                let gone = missing(&before, &self.gateways);
                self.forget_objects(gone.into_iter().map(Subject::Gateway));
                self.advance_if(before != self.gateways, |of| &mut of.gateways);
            }
            Change::OverridesReplaced(all) => self.replace_overrides(*all),
            Change::Noted(note) => self.note(note),
            Change::ServiceDeleted(name) => {
                self.remove_leftover(&name);
                self.remove_service(&name);
                self.unserved.remove(&name);
                self.forget_objects([Subject::Service(name)]);
            }
            Change::SliceDeleted(name) => {
                self.delete_slice(&name);
                self.forget_objects([Subject::Slice(name)]);
            }
        }
    }

    /// Adds a note on an object.
    fn note(&mut self, note: Note) {
        let of_object = self.notes.entry(note.subject.clone()).or_default();
        if !of_object.contains(&note) {
            of_object.push(note);
        }
    }

    /// Forgets the notes on an object that has become valid, except those of this cause.
    fn forget_notes(&mut self, subject: &Subject, except: Option<Cause>) {
        if let Some(of_object) = self.notes.get_mut(subject) {
            of_object.retain(|note| Some(note.remark.cause) == except);
            if of_object.is_empty() {
                self.notes.remove(subject);
            }
        }
    }

    /// Records objects as deleted. Nobody reads notes on them any more.
    fn forget_objects(&mut self, objects: impl IntoIterator<Item = Subject>) {
        for subject in objects {
            self.notes.remove(&subject);
            self.deleted.insert(subject);
        }
    }

    /// Whether the source has listed all objects once. Before that nothing may be planned.
    #[must_use]
    pub const fn is_complete(&self) -> bool {
        let objects_known =
            self.services_known && self.slices_known && self.nodes_known && self.namespaces_known && self.pools_known;
        objects_known && self.gateways_known && self.overrides_known && self.checkpoint_known
    }

    /// Begins a term of leadership: what a leader reads for itself is unknown.
    pub fn begin_term(&mut self) {
        (self.gateways_known, self.checkpoint_known, self.overrides_known) = (false, false, false);
        self.forget_what_only_plans_need();
    }

    /// Forgets what is kept for the next plan, of a replica that makes none. The newest note on each object
    /// stays: a new leader records it.
    pub fn forget_what_only_plans_need(&mut self) {
        for name in std::mem::take(&mut self.deleted_slices) {
            self.remove_slice(&name);
        }
        self.slices_changed = false;
        for of_object in self.notes.values_mut().filter(|of_object| of_object.len() > 1) {
            of_object.drain(..of_object.len() - 1);
        }
        while self.notes.len() > NOTED_OBJECTS_MAX {
            self.notes.pop_first();
        }
    }

    /// Services that may be ours.
    #[must_use]
    pub const fn services(&self) -> &BTreeMap<ServiceName, ServiceEntry> {
        &self.services
    }

    /// Revision that grows with every change that matters to a plan.
    #[must_use]
    pub const fn revision(&self) -> u64 {
        self.revision
    }

    /// Revisions at the last change of each kind of object.
    #[must_use]
    pub const fn revisions(&self) -> Revisions {
        self.revisions
    }

    /// Existing Services that changed after `revision`, ordered by their last change.
    pub fn changed_since(&self, revision: u64) -> impl Iterator<Item = &ServiceName> {
        self.touched.range((Bound::Excluded(revision), Bound::Unbounded)).map(|(_, name)| name)
    }

    /// Services that are being deleted or changed their type, and still carry our finalizer, conditions or addresses.
    #[must_use]
    pub const fn leftovers(&self) -> &BTreeMap<ServiceName, Arc<ServiceObject>> {
        &self.leftovers
    }

    /// The slices of one Service, by name.
    pub fn slices_of(&self, service: &ServiceName) -> impl Iterator<Item = &SliceSpec> {
        self.all_slices_of(service).filter(|slice| !self.deleted_slices.contains(&slice.name))
    }

    /// Slices of one Service that were deleted while it remained, in their last version.
    pub fn deleted_slices_of(&self, service: &ServiceName) -> impl Iterator<Item = &SliceSpec> {
        self.all_slices_of(service).filter(|slice| self.deleted_slices.contains(&slice.name))
    }

    fn all_slices_of(&self, service: &ServiceName) -> impl Iterator<Item = &SliceSpec> {
        self.slices_of.get(service).into_iter().flatten().filter_map(|name| self.slices.get(name))
    }

    /// Forgets the deleted slices of these Services. A plan that still uses any of them must not name its Service.
    pub fn forget_deleted_slices(&mut self, services: &[ServiceName]) {
        for service in services {
            let names: Vec<ServiceName> = self.deleted_slices_of(service).map(|slice| slice.name.clone()).collect();
            names.iter().for_each(|name| drop(self.take_slice(name)));
        }
    }

    /// Whether a slice was added, changed or removed since they were last taken.
    #[must_use]
    pub const fn have_slices_changed(&self) -> bool {
        self.slices_changed
    }

    /// The same, and forgets it.
    pub const fn take_slices_changed(&mut self) -> bool {
        std::mem::replace(&mut self.slices_changed, false)
    }

    /// All nodes, by name.
    #[must_use]
    pub const fn nodes(&self) -> &BTreeMap<String, NodeSpec> {
        &self.nodes
    }

    /// The labels of a namespace, including `kubernetes.io/metadata.name`, which the API server sets. A namespace that
    /// is known only from its Services has just that label.
    #[must_use]
    pub fn namespace_labels(&self, name: &str) -> Labels {
        let own_name = || [(NAMESPACE_NAME_LABEL.to_owned(), name.to_owned())].into();
        self.namespaces.get(name).cloned().unwrap_or_else(own_name)
    }

    /// The namespaces that are being deleted.
    #[must_use]
    pub const fn ending_namespaces(&self) -> &BTreeSet<String> {
        &self.ending_namespaces
    }

    /// Objects that were deleted, and Services that began to be deleted, since the last call.
    pub fn take_deleted(&mut self) -> BTreeSet<Subject> {
        std::mem::take(&mut self.deleted)
    }

    /// The `AddressPool` objects, by name.
    #[must_use]
    pub const fn pools(&self) -> &BTreeMap<String, AddressPool> {
        &self.pools
    }

    /// All gateways ever seen, of every group, by name; known before any of them connects.
    #[must_use]
    pub const fn gateways(&self) -> &BTreeMap<String, KnownGateway> {
        &self.gateways
    }

    /// Decisions of a previous leader.
    #[must_use]
    pub const fn checkpoint(&self) -> &Checkpoint {
        &self.checkpoint
    }

    /// Manual overrides of operators.
    #[must_use]
    pub const fn overrides(&self) -> &Overrides {
        &self.overrides
    }

    /// Revision that grows when an override changes.
    #[must_use]
    pub const fn overrides_revision(&self) -> u64 {
        self.overrides_revision
    }

    /// The addresses of drained nodes.
    #[must_use]
    pub const fn drained_nodes(&self) -> &Arc<DrainedNodes> {
        &self.drained_nodes
    }

    /// Notes on objects since the last call, as far as they still hold.
    pub fn take_notes(&mut self) -> Vec<Note> {
        std::mem::take(&mut self.notes).into_values().flatten().collect()
    }

    /// Overrides may concern every Service and change rarely, so a change examines all Services again.
    fn replace_overrides(&mut self, overrides: Overrides) {
        self.overrides_known = true;
        if overrides != self.overrides {
            self.overrides = overrides;
            self.collect_drained_nodes();
            self.revision += 1;
            self.overrides_revision = self.revision;
            let all: Vec<ServiceName> = self.services.keys().cloned().collect();
            all.iter().for_each(|name| self.touch(name));
        }
    }

    fn collect_drained_nodes(&mut self) {
        let all = self.drained_nodes.of(&self.overrides.drained_node_names(), &self.nodes, self.slices.values());
        self.drained_nodes = Arc::new(all);
    }

    /// Takes over addresses of drained nodes, if there is any news of them.
    fn follow_drained_nodes(&mut self, news: Option<DrainedNodes>) {
        let Some(news) = news else { return };
        self.drained_nodes = Arc::new(news);
        if self.drained_nodes.are_too_many() {
            self.collect_drained_nodes();
        }
    }

    fn replace_namespaces(&mut self, namespaces: &[Namespace]) {
        let ending = namespaces.iter().filter(|namespace| namespace.metadata.deletion_timestamp.is_some());
        self.ending_namespaces = ending.filter_map(|namespace| namespace.metadata.name.clone()).collect();
        let all = namespaces.iter().filter_map(labels_of).collect();
        let before = std::mem::replace(&mut self.namespaces, all);
        let gone = missing(&before, &self.namespaces);
        self.forget_objects(gone.into_iter().map(Subject::Namespace));
        self.notes.retain(|subject, _| !matches!(subject, Subject::Namespace(name) if self.namespaces.contains_key(name)));
        self.advance_if(before != self.namespaces, |of| &mut of.namespaces);
        self.namespaces_known = true;
    }

    fn put_namespace(&mut self, namespace: &Namespace) {
        let Some((name, labels)) = labels_of(namespace) else { return };
        if namespace.metadata.deletion_timestamp.is_some() {
            self.ending_namespaces.insert(name.clone());
        } else {
            self.ending_namespaces.remove(&name);
        }
        self.forget_notes(&Subject::Namespace(name.clone()), None);
        let has_changed = self.namespaces.get(&name) != Some(&labels);
        self.namespaces.insert(name, labels);
        self.advance_if(has_changed, |of| &mut of.namespaces);
    }

    fn remove_namespace(&mut self, name: &str) {
        self.ending_namespaces.remove(name);
        self.forget_objects([Subject::Namespace(name.to_owned())]);
        let was_known = self.namespaces.remove(name).is_some();
        self.advance_if(was_known, |of| &mut of.namespaces);
    }

    fn replace_pools(&mut self, pools: Vec<AddressPool>) {
        let all = pools.into_iter().filter_map(|pool| Some((pool.metadata.name.clone()?, pool))).collect();
        let before = std::mem::replace(&mut self.pools, all);
        let gone = missing(&before, &self.pools);
        self.forget_objects(gone.into_iter().map(Subject::Pool));
        self.notes.retain(|subject, _| !matches!(subject, Subject::Pool(name) if self.pools.contains_key(name)));
        let has_changed = !before.iter().map(without_status).eq(self.pools.iter().map(without_status));
        self.advance_if(has_changed, |of| &mut of.pools);
        self.pools_known = true;
    }

    fn put_pool(&mut self, pool: AddressPool) {
        let Some(name) = pool.metadata.name.clone() else { return };
        self.forget_notes(&Subject::Pool(name.clone()), None);
        let has_changed = self.pools.get_key_value(&name).map(without_status) != Some(without_status((&name, &pool)));
        self.pools.insert(name, pool);
        self.advance_if(has_changed, |of| &mut of.pools);
    }

    fn remove_pool(&mut self, name: &str) {
        self.forget_objects([Subject::Pool(name.to_owned())]);
        let was_known = self.pools.remove(name).is_some();
        self.advance_if(was_known, |of| &mut of.pools);
    }

    fn replace_nodes(&mut self, nodes: &[Node]) {
        let specs = nodes.iter().filter_map(|node| NodeSpec::try_from(node).ok()).map(|spec| (spec.name.clone(), spec));
        let before = std::mem::replace(&mut self.nodes, specs.collect());
        let has_changed = before != self.nodes;
        let gone = missing(&before, &self.nodes);
        self.forget_objects(gone.into_iter().map(Subject::Node));
        self.notes.retain(|subject, _| !matches!(subject, Subject::Node(name) if self.nodes.contains_key(name)));
        self.advance_if(has_changed, |of| &mut of.nodes);
        self.nodes_known = true;
        if has_changed {
            self.collect_drained_nodes();
        }
    }

    /// Nodes update their status every few minutes; that rarely changes a relevant field.
    fn put_node(&mut self, node: NodeSpec) {
        self.forget_notes(&Subject::Node(node.name.clone()), None);
        let has_changed = self.nodes.get(&node.name) != Some(&node);
        self.follow_drained_nodes(self.drained_nodes.seeing_node(&node));
        self.nodes.insert(node.name.clone(), node);
        self.advance_if(has_changed, |of| &mut of.nodes);
    }

    fn remove_node(&mut self, name: &str) {
        self.forget_objects([Subject::Node(name.to_owned())]);
        let was_known = self.nodes.remove(name).is_some();
        self.advance_if(was_known, |of| &mut of.nodes);
    }

    /// Begins a new revision if objects of a kind have changed.
    fn advance_if(&mut self, has_changed: bool, kind: impl FnOnce(&mut Revisions) -> &mut u64) {
        if has_changed {
            self.revision += 1;
            *kind(&mut self.revisions) = self.revision;
        }
    }

    fn replace_services(&mut self, services: Vec<ReadService>) {
        let noted = std::mem::take(&mut self.unserved);
        let left: Vec<ServiceName> = self.leftovers.keys().cloned().collect();
        left.iter().for_each(|name| self.remove_leftover(name));
        let listed: BTreeSet<ServiceName> =
            services.into_iter().filter_map(|service| self.apply_service(service, &noted)).collect();
        let gone: Vec<ServiceName> = self.services.keys().filter(|name| !listed.contains(*name)).cloned().collect();
        gone.iter().for_each(|name| self.remove_service(name));
        let gone = noted.into_iter().filter(|name| !listed.contains(name) && !self.unserved.contains(name));
        let gone: Vec<Subject> = gone.map(Subject::Service).collect();
        self.forget_objects(gone);
        self.services_known = true;
    }

    /// Returns the name of a Service that may be ours. The owners of those in `noted` know already that they are never
    /// served.
    fn apply_service(
        &mut self,
        ReadService { name, candidate, leftover }: ReadService,
        noted: &BTreeSet<ServiceName>,
    ) -> Option<ServiceName> {
        self.put_leftover(&name, leftover);
        match candidate {
            Ok(candidate) => {
                self.forget_notes(&Subject::Service(name.clone()), None);
                self.put_service(candidate);
                Some(name)
            }
            Err(error) => {
                self.leave_service_out(&error, noted);
                None
            }
        }
    }

    fn replace_slices(&mut self, slices: Vec<ReadSlice>) {
        let listed: BTreeSet<ServiceName> = slices.into_iter().filter_map(|slice| self.apply_slice(slice)).collect();
        let gone: Vec<ServiceName> = self.slices.keys().filter(|name| !listed.contains(*name)).cloned().collect();
        gone.iter().for_each(|name| self.delete_slice(name));
        self.forget_objects(gone.into_iter().map(Subject::Slice));
        self.slices_known = true;
    }

    /// Returns the name of a slice that is used. Another one is dropped.
    fn apply_slice(&mut self, ReadSlice(slice): ReadSlice) -> Option<ServiceName> {
        match slice {
            Ok(spec) => {
                let name = spec.name.clone();
                self.forget_notes(&Subject::Slice(name.clone()), None);
                self.put_slice(spec);
                Some(name)
            }
            Err(error) => {
                if let SliceError::NoService(name) = &error {
                    self.remove_slice(name);
                }
                tracing::debug!(%error, "slice not used");
                None
            }
        }
    }

    fn put_leftover(&mut self, name: &ServiceName, leftover: Option<Box<ServiceObject>>) {
        match leftover {
            Some(leftover) => {
                self.revision += 1;
                let held = |left: &ServiceObject| left.holds_addresses().then(|| left.held.ingress.clone());
                if held(&leftover) != self.leftovers.get(&leftover.name).and_then(|old| held(old)) {
                    self.revisions.services = self.revision;
                }
                self.leftovers.insert(leftover.name.clone(), Arc::from(leftover));
            }
            None => self.remove_leftover(name),
        }
    }

    fn remove_leftover(&mut self, name: &ServiceName) {
        if let Some(leftover) = self.leftovers.remove(name) {
            self.revision += 1;
            if leftover.holds_addresses() {
                self.revisions.services = self.revision;
            }
        }
    }

    fn put_service(&mut self, mut candidate: Box<Candidate>) {
        let name = candidate.object.name.clone();
        let before = self.services.get(&name);
        if let Some(old) = before.filter(|entry| entry.candidate.object.uid == candidate.object.uid)
            && let (Ok(wanted), Ok(old)) = (&mut candidate.wanted, &old.candidate.wanted)
        {
            wanted.keep(old);
        }
        if before.is_some_and(|entry| entry.candidate == candidate) {
            return;
        }
        self.unserved.remove(&name);
        let kept = before.filter(|entry| entry.candidate.asks_the_same(&candidate)).map(|entry| entry.revision);
        self.forget_touch(&name);
        self.revision += 1;
        if kept.is_none() {
            self.revisions.services = self.revision;
        }
        self.touched.insert(self.revision, name.clone());
        let entry = ServiceEntry { revision: kept.unwrap_or(self.revision), touched: self.revision, candidate };
        self.services.insert(name, entry);
    }

    fn forget_touch(&mut self, name: &ServiceName) {
        if let Some(entry) = self.services.get(name) {
            self.touched.remove(&entry.touched);
        }
    }

    fn remove_service(&mut self, name: &ServiceName) {
        self.forget_deleted_slices(std::slice::from_ref(name));
        self.forget_touch(name);
        if self.services.remove(name).is_some() {
            self.deleted.insert(Subject::Service(name.clone()));
            self.revision += 1;
            self.revisions.services = self.revision;
        }
    }

    /// Records a Service that can never be served as it is. Its owner gets one note if the object looks as if they
    /// expect it.
    fn leave_service_out(&mut self, error: &NotServable, noted: &BTreeSet<ServiceName>) {
        let NotServable::NotOurs { name, why, is_expected } = error else {
            return tracing::warn!(%error, "object ignored");
        };
        tracing::debug!(%error, "not served");
        self.remove_service(name);
        self.forget_notes(&Subject::Service(name.clone()), is_expected.then_some(Cause::NeverServed));
        if *is_expected && self.unserved.insert(name.clone()) && !noted.contains(name) {
            let remark = Remark::new(Cause::NeverServed, format!("not served: {why}"));
            self.note(Note { subject: Subject::Service(name.clone()), remark });
        }
    }

    fn put_slice(&mut self, slice: SliceSpec) {
        if self.slices.get(&slice.name) == Some(&slice) && !self.deleted_slices.contains(&slice.name) {
            return;
        }
        // A slice may move to another Service, because its label is mutable.
        self.remove_slice(&slice.name);
        self.touch_by_slice(&slice.service);
        self.follow_drained_nodes(self.drained_nodes.seeing_slice(&slice));
        self.slices_of.entry(slice.service.clone()).or_default().insert(slice.name.clone());
        self.slices.insert(slice.name.clone(), slice);
    }

    /// Records a deleted slice, which may be created again under another name.
    fn delete_slice(&mut self, name: &ServiceName) {
        let Some(slice) = self.slices.get(name) else { return };
        let is_replaced = slice.is_managed && slice.endpoints.iter().any(|endpoint| !endpoint.terminating);
        if !is_replaced || !self.services.contains_key(&slice.service) {
            self.remove_slice(name);
        } else if self.deleted_slices.insert(name.clone()) {
            let service = slice.service.clone();
            self.touch_by_slice(&service);
        }
    }

    fn remove_slice(&mut self, name: &ServiceName) {
        if let Some(slice) = self.take_slice(name) {
            self.touch_by_slice(&slice.service);
        }
    }

    fn touch_by_slice(&mut self, service: &ServiceName) {
        self.slices_changed = true;
        self.touch(service);
    }

    fn take_slice(&mut self, name: &ServiceName) -> Option<SliceSpec> {
        let slice = self.slices.remove(name)?;
        self.deleted_slices.remove(name);
        if let Some(names) = self.slices_of.get_mut(&slice.service) {
            names.remove(name);
            if names.is_empty() {
                self.slices_of.remove(&slice.service);
            }
        }
        Some(slice)
    }

    fn touch(&mut self, service: &ServiceName) {
        self.revision += 1;
        self.forget_touch(service);
        if let Some(entry) = self.services.get_mut(service) {
            (entry.revision, entry.touched) = (self.revision, self.revision);
            self.touched.insert(self.revision, service.clone());
        }
    }
}

/// Names of the objects that are only in the former list.
fn missing<T>(before: &BTreeMap<String, T>, now: &BTreeMap<String, T>) -> Vec<String> {
    before.keys().filter(|name| !now.contains_key(*name)).cloned().collect()
}

fn labels_of(namespace: &Namespace) -> Option<(String, Labels)> {
    let name = namespace.metadata.name.clone()?;
    let mut labels = namespace.metadata.labels.clone().unwrap_or_default();
    labels.insert(NAMESPACE_NAME_LABEL.to_owned(), name.clone());
    Some((name, labels))
}

/// Name and fields of a pool that matter to a plan.
fn without_status<'a>((name, pool): (&'a String, &'a AddressPool)) -> (&'a String, &'a AddressPoolSpec, Option<&'a Labels>) {
    (name, &pool.spec, pool.metadata.labels.as_ref())
}

#[cfg(test)]
mod tests;
