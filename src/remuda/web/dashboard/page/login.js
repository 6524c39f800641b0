// Sign-in page. A token in the URL fragment is removed from the address and submitted with the form.
const token = new URLSearchParams(location.hash.slice(1)).get("token");
document.getElementById("invalid").hidden = !new URLSearchParams(location.search).has("invalid");
if (location.hash) history.replaceState(null, "", location.pathname + location.search);
if (token) {
  document.getElementById("token").value = token;
  document.getElementById("sign-in").submit();
}
